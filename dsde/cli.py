"""``python -m dsde``: generate text, run the demonstration, plot a trace.

torch and what needs it is imported by the command that uses it, so that ``--help`` and usage errors answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

_PROMPTS_HELP = """JSON lines, one object a prompt; its "turns" is a list of strings, the first of which is the prompt
(the format of MT-Bench and Spec-Bench)"""


class _Refused(Exception):
    """The input is at fault: one line for the user, exit code 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"dsde: error: {message} (see {self.prog} --help)\n")


@contextlib.contextmanager
def _user_input(what: str = "") -> Iterator[None]:
    """Inside this block a ValueError or OSError is about what the user gave, not a fault of the program."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise _Refused(f"{what}{error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 done, 1 failed, 2 refused)."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the text may hold what the terminal's encoding lacks
    try:
        return args.run(args)
    except _Refused as refusal:
        print(f"dsde: error: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has left; Python must not complain again when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text}")
    return int(text)


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dsde", description="Lossless speculative decoding with a draft length for each sequence.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="decode prompts with a target and a draft model")
    generate.set_defaults(run=_generate)
    models = generate.add_argument_group("models")
    models.add_argument(
        "--target", required=True, type=_name, metavar="DIR_OR_ID", help="folder or Hub id of the target model"
    )
    models.add_argument(
        "--draft", type=_name, metavar="DIR_OR_ID", help="folder or Hub id of the draft model, or ngram: prompt lookup"
    )
    models.add_argument("--controller", default="dsde", metavar="NAME", help="off, static-K or dsde (default: dsde)")
    models.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    models.add_argument(
        "--max-sequences", type=_count, default=32, metavar="N", help="sequences at a time (default: 32)"
    )
    prompts = generate.add_argument_group("prompts").add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated")
    prompts.add_argument("--prompts", type=_name, metavar="FILE.jsonl", help=_PROMPTS_HELP)
    generate.add_argument("--chat", action="store_true", help="put each prompt into the target's chat template")
    sampling = generate.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=_count, default=128, metavar="N", help="default: 128")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    sampling.add_argument("--top-k", type=int, metavar="K")
    sampling.add_argument("--top-p", type=float, metavar="P")
    sampling.add_argument("--min-p", type=float, metavar="P")
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="the text ends with it; repeatable"
    )
    generate.add_argument(
        "--trace", type=_name, metavar="FILE.jsonl", help="write each request's steps, for the plot command"
    )

    demo = commands.add_parser("demo", help="off, static-4 and dsde on the same prompts, timed and compared")
    demo.set_defaults(run=_demo)
    demo.add_argument("--llm", action="store_true", help="SmolLM2-135M-Instruct instead of the embedded pair")
    demo.add_argument("--prompts", type=_count, metavar="N", help="default: 16; with --llm: 8")
    demo.add_argument("--max-new-tokens", type=_count, metavar="N", help="default: 96; with --llm: 32")
    demo.add_argument("--json", type=_name, metavar="FILE", help="write the figures and their conditions")
    demo.add_argument(
        "--trace", type=_name, metavar="FILE.jsonl", help="write the steps of the dsde run, for the plot command"
    )

    plot = commands.add_parser("plot", help="draw a trace: drafted and accepted tokens, SL, KLD, WVIR")
    plot.set_defaults(run=_plot)
    plot.add_argument("trace", type=_name, metavar="TRACE.jsonl", help="written by generate or demo with --trace")
    plot.add_argument("-o", "--output", required=True, type=_name, metavar="OUT.png")
    plot.add_argument("--request", type=int, metavar="ID", help="default: the request with the most steps")
    return parser


def _generate(args: argparse.Namespace) -> int:
    from dsde import SamplingParams

    with _user_input():
        texts = _read_prompts(args.prompts) if args.prompts is not None else list(_label(args.prompt))
        params = SamplingParams(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            stop=args.stop,
        )
    for label, text in texts:
        if not text.strip():
            raise _Refused(f"{label}: the prompt is empty")
        if not _is_unicode(text):
            raise _Refused(f"{label}: the prompt is no valid Unicode text")
    _check_writable(args.trace)
    engine, tokenizer = _load_engine(args, len(texts))

    requests = []
    for label, text in texts:
        with _user_input(f"{label}: "):
            requests.append(engine.submit(_encode(tokenizer, text, args.chat), params))
    start = time.perf_counter()
    if len(requests) == 1:
        _stream(engine, tokenizer, requests[0])
    else:
        _print_as_they_end(engine, tokenizer, len(requests))
    completions = [r.completion for r in requests]
    print(_summary_line(completions, time.perf_counter() - start), file=sys.stderr)
    if args.trace:
        from dsde.trace import write_trace

        with _user_input():
            write_trace(args.trace, completions)
    failed = [(label, c.error) for (label, _), c in zip(texts, completions, strict=True) if c.finish_reason == "error"]
    for label, error in failed:
        print(f"dsde: {label} failed: {error}", file=sys.stderr)
    return 1 if failed else 0


def _is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogate, as bytes that are no UTF-8 become on the command line."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _check_writable(*paths: str | None) -> None:
    """Refuse output files that cannot be written, before the work whose result they are to hold."""
    for path in paths:
        if path is not None:
            with _user_input():
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                open(path, "a").close()


def _label(prompts: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((f"prompt {i}", prompt) for i, prompt in enumerate(prompts))


def _read_prompts(path: str) -> list[tuple[str, str]]:
    """Return ``file:line`` and prompt of each line; ValueError for a line of another form."""
    from dsde.trace import read_jsonl

    prompts = []
    for number, record in read_jsonl(path):
        turns = record.get("turns")
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ValueError(f'{path}:{number}: "turns" must be a list that starts with the prompt')
        prompts.append((f"{path}:{number}", turns[0]))
    if not prompts:
        raise ValueError(f"{path}: no prompts in this file")
    return prompts


def _load_engine(args: argparse.Namespace, prompts: int) -> tuple[Any, Any]:
    import torch

    from dsde import Engine
    from dsde.controllers import named
    from dsde.models import check_tokenizers, load_model, load_tokenizer

    _quiet_transformers()
    dtype = getattr(torch, args.dtype)
    with _user_input():
        adapter = named(args.controller)
        if adapter.sl_limit > 0 and args.draft is None:
            raise ValueError(f"--controller {args.controller} needs --draft")
        tokenizer = load_tokenizer(args.target)
        draft = None
        if adapter.sl_limit > 0 and args.draft == "ngram":
            draft = "ngram"
        elif adapter.sl_limit > 0:
            check_tokenizers(tokenizer, load_tokenizer(args.draft))
            draft = load_model(args.draft, dtype)
        target = load_model(args.target, dtype)
        # The seed is the engine's: a seed of each request would give all prompts the same random numbers.
        sequences = min(args.max_sequences, prompts)
        engine = Engine(
            target,
            draft,
            adapter,
            tokenizer=tokenizer,
            max_sequences=sequences,
            max_tokens_per_step=max(2048, sequences),
            seed=args.seed,
        )
    return engine, tokenizer


def _encode(tokenizer: Any, text: str, chat: bool) -> list[int]:
    if not chat:
        return tokenizer(text).input_ids
    if tokenizer.chat_template is None:
        raise ValueError("--chat needs a chat template, which the target's tokenizer lacks")
    message = [{"role": "user", "content": text}]
    try:
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # the template is a program of its own
        raise ValueError(f"the target's chat template fails: {type(error).__name__}: {error}") from error
    return tokenizer(text, add_special_tokens=False).input_ids


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _stream(engine: Any, tokenizer: Any, request: Any) -> None:
    """Print the text as it grows; a character that is cut in the middle waits for its other bytes."""
    printed = 0
    while engine.has_work:
        engine.step()
        text = _decode(tokenizer, request.tokens[len(request.prompt_ids) :])
        if engine.has_work:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")
        print(text[printed:], end="", flush=True)
        printed = max(printed, len(text))
    print()


def _print_as_they_end(engine: Any, tokenizer: Any, total: int) -> None:
    from tqdm import tqdm

    with tqdm(total=total, unit="prompt") as bar:
        while engine.has_work:
            for done in engine.step():
                text = _decode(tokenizer, done.token_ids)
                head = f"[{done.request_id}] {done.finish_reason}, {len(done.token_ids)} tokens"
                bar.write(f"{head}\n{text}\n", file=sys.stdout)
                bar.update()


def _summary_line(completions: Sequence[Any], wall_s: float) -> str:
    from dsde.metrics import summary

    s = summary(completions, wall_s)
    line = f"{s['tokens']} tokens in {wall_s:.2f} s, {s['tokens_per_s']:.1f} tokens/s"
    if s["mean_sl"]:
        line += f"; {s['accepted_per_step']:.2f} of {s['mean_sl']:.2f} drafted tokens accepted per step"
    return line


def _demo(args: argparse.Namespace) -> int:
    from dsde.demo.run import demonstrate, embedded_pair, packaged_llm, report

    _check_writable(args.json, args.trace)
    _quiet_transformers()
    with _user_input():
        task = (packaged_llm if args.llm else embedded_pair)(args.prompts, args.max_new_tokens)
    result, completions = demonstrate(task)
    print(report(result))
    with _user_input():
        if args.json:
            import json

            Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if args.trace:
            from dsde.trace import write_trace

            write_trace(args.trace, completions)
    return 0 if result["identical"] else 1


def _plot(args: argparse.Namespace) -> int:
    from dsde.trace import read_trace

    try:
        from dsde.plot import plot_trace
    except ModuleNotFoundError as error:
        raise _Refused(f"plotting needs {error.name}: pip install {error.name}") from error
    with _user_input():
        plot_trace(read_trace(args.trace), args.output, args.request)
    return 0


def _quiet_transformers() -> None:
    """No loading bars and warnings of transformers between our own lines."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
