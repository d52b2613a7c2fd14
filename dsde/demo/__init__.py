"""The demonstration: an embedded model pair, a real LLM, and the run that compares the modes."""
