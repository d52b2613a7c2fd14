"""Patching and un-patching, threads, calls handed back, and failures."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import sys
import threading
import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from dsde import Decoder, Dsde, patch
from tests.dsde.generate_support import batch
from tests.dsde.models import COMMON, build, weaken
from tests.dsde.test_cache import FORGETS_NOTHING

NEW = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}


class TestPatch:
    def test_undo_removes_the_attribute(self, pair):
        target, draft = pair
        patched = patch(target, draft)
        assert target.generate is patched
        patched.undo()
        patched.undo()
        assert "generate" not in vars(target)
        assert target.generate.__func__ is type(target).generate

    def test_an_exception_unpatches(self, pair):
        target, draft = pair
        with pytest.raises(KeyError), patch(target, draft):
            raise KeyError

    def test_nested(self, pair):
        target, draft = pair
        with patch(target, draft) as outer:
            with patch(target, "ngram") as inner:
                assert target.generate is inner
            assert target.generate is outer

    def test_undone_in_any_order(self, pair):
        target, draft = pair
        first, second = patch(target, draft), patch(target, "ngram")
        first.undo()
        assert target.generate is second
        second.undo()
        assert "generate" not in vars(target)

    def test_a_generate_of_the_instance_comes_back(self, pair):
        target, draft = pair
        target.generate = own = object()
        with patch(target, draft):
            pass
        assert target.generate is own
        del target.generate

    def test_options_are_checked_at_once(self, pair):
        target, draft = pair
        for make in (functools.partial(patch, target), functools.partial(Decoder, draft)):
            with pytest.raises(ValueError, match=r"contorller.*max_sequences"):
                make(contorller="off")
            with pytest.raises(ValueError, match=r"controller must be .*fast"):
                make(controller="fast")

    def test_the_engine_is_kept(self, pair):
        target, draft = pair
        with patch(target, draft) as patched:
            target.generate(**batch(), **NEW)
            engine = patched.decoder.prepare(target)
            target.generate(**batch(), **NEW)
            assert patched.decoder.prepare(target) is engine
            assert engine.stats()["drafted"] > 0
            assert engine.stats()["free_blocks"] == engine.stats()["blocks"]

    def test_a_model_that_changes_its_format_gets_a_new_engine(self):
        target = build("llama")
        draft = weaken(target)
        with patch(target, draft) as patched:
            engine = patched.decoder.prepare(target)
            target.to(torch.bfloat16)
            target.generate(**batch(), **NEW)
            assert patched.decoder.prepare(target) is not engine

    @pytest.mark.parametrize("size", [70, 30])
    def test_a_model_that_changes_its_vocabulary_gets_a_new_engine(self, size):
        target = build("llama")
        with patch(target, weaken(target)):
            target.resize_token_embeddings(size)
            ids = torch.tensor([[5, size - 1, 7]])
            want = type(target).generate(target, ids, **NEW)
            assert torch.equal(target.generate(ids, **NEW), want)

    def test_a_pool_that_is_too_small_for_a_call_grows(self, pair, monkeypatch):
        target, draft = pair
        want = target.generate(**batch(), **NEW | {"max_new_tokens": 60})
        monkeypatch.setattr("dsde.engine._DEFAULT_POSITIONS", 32)
        with patch(target, draft) as patched:
            target.generate(**batch(), **NEW)
            small = patched.decoder.prepare(target)
            assert small.stats()["blocks"] == 1
            assert torch.equal(target.generate(**batch(), **NEW | {"max_new_tokens": 60}), want)
            assert patched.decoder.prepare(target).stats()["blocks"] == 3

    def test_a_controller_object_keeps_its_engine(self, pair, monkeypatch):
        target, draft = pair
        monkeypatch.setattr("dsde.engine._DEFAULT_POSITIONS", 32)
        with patch(target, draft, controller=Dsde()):
            with pytest.raises(ValueError, match="kv_blocks"):
                target.generate(**batch(), **NEW | {"max_new_tokens": 60})
            target.generate(**batch(), **NEW)

    def test_installed_again_below_another(self, pair):
        target, draft = pair
        first, second = patch(target, draft), patch(target, "ngram")
        first.undo()
        first.install()
        assert target.generate is first
        with pytest.warns(UserWarning, match="beam"):
            target.generate(**batch(), **NEW, num_beams=2)
        second.undo()
        assert target.generate is first
        first.undo()
        assert "generate" not in vars(target)

    def test_the_signature_is_that_of_generate(self, pair):
        target, draft = pair
        want = inspect.signature(target.generate)
        with patch(target, draft):
            assert inspect.signature(target.generate) == want

    @pytest.mark.parametrize("option", ["streamer", "stop_strings"])
    def test_an_option_of_calls_is_refused(self, pair, option):
        with pytest.raises(ValueError, match=f"{option} belongs to a call"):
            patch(*pair, **{option: "x"})

    def test_copies_are_not_patched(self, pair):
        target, draft = pair
        with patch(target, draft):
            twins = copy.deepcopy(target), pickle.loads(pickle.dumps(target))
        for twin in twins:
            assert twin.generate.args == (twin,)
            assert torch.equal(twin.generate(**batch(), **NEW), target.generate(**batch(), **NEW))

    def test_the_attention_implementation_comes_back(self, pair):
        target, draft = pair
        before = target.config._attn_implementation
        with patch(target, draft):
            target.generate(**batch(), **NEW)
            assert target.config._attn_implementation == before

    def test_a_bad_option_is_said_at_once(self, pair):
        with pytest.raises(ValueError, match="controller"):
            patch(*pair, controller="fastest")

    def test_without_a_draft_plain_calls_run_as_before(self, pair):
        target, draft = pair
        want = target.generate(**batch(), **NEW)
        with patch(target) as patched:
            assert torch.equal(target.generate(**batch(), **NEW), want)
            assert patched.decoder._engine is None
            assert torch.equal(target.generate(**batch(), **NEW, assistant_model=draft), want)
            assert patched.decoder._engine.draft.model is draft
            assert torch.equal(target.generate(**batch(), **NEW, prompt_lookup_num_tokens=4), want)

    def test_outputs_can_take_part_in_autograd(self, pair):
        target, draft = pair
        with patch(target, draft):
            out = target.generate(**batch(), **NEW, return_dict_in_generate=True, output_logits=True)
        assert not out.sequences.is_inference() and not out.logits[0].is_inference()


def test_threads_take_turns(pair):
    target, draft = pair
    inputs = [batch(seed=s) for s in range(4)]
    want = [target.generate(**i, **NEW) for i in inputs]
    got = [None] * 4

    def work(n):
        got[n] = target.generate(**inputs[n], **NEW)

    with patch(target, draft):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("through", ["patch", "beams", "decoder"])
def test_calls_that_are_handed_back_take_turns_too(pair, through):
    """Started when the model is lent to a running call, they would meet its packed attention."""
    target, draft = pair
    options = {"num_beams": 2} if through == "beams" else {"max_new_tokens": 125}
    if through == "decoder":
        options["custom_generate"] = Decoder(draft)
    plain = NEW | options
    plain.pop("custom_generate", None)
    want = target.generate(**batch(), **plain)
    got = []

    def other():
        got.append(target.generate(**batch(), **NEW | options))

    thread = threading.Thread(target=other)

    def start_it(module, inputs):
        hook.remove()
        thread.start()
        thread.join(0.5)

    with patch(target, draft), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hook = target.register_forward_pre_hook(start_it)
        target.generate(**batch(), **NEW)
        thread.join()
    assert torch.equal(got[0], want)


class TestHandedBack:
    @pytest.mark.parametrize(
        "options", [{"num_beams": 3}, {"num_beams": 2, "do_sample": True}, {"max_new_tokens": 125}], ids=str
    )
    def test_one_warning_and_the_same_output(self, pair, options):
        target, draft = pair
        torch.manual_seed(3)
        want = target.generate(**batch(), **NEW | options)
        with patch(target, draft), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                torch.manual_seed(3)
                assert torch.equal(target.generate(**batch(), **NEW | options), want)
        assert sum("hands this call back" in str(w.message) for w in seen) == 1

    def test_a_recurrent_model(self, pair):
        config = MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=1, eos_token_id=None)
        mamba = MambaForCausalLM(config).eval()
        ids = torch.tensor([[5, 6, 7]])
        want = mamba.generate(ids, **NEW)
        with patch(mamba, pair[1]), pytest.warns(UserWarning, match="state that cannot be rolled back"):
            assert torch.equal(mamba.generate(ids, **NEW), want)

    def test_one_warning_whatever_the_length(self, pair):
        target, draft = pair
        with patch(target, draft), warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for length in (125, 126):
                target.generate(**batch(), **NEW | {"max_new_tokens": length})
        assert sum("hands this call back" in str(w.message) for w in seen) == 1

    @pytest.mark.parametrize("width", [7, 40])
    def test_beyond_the_original_context_of_a_long_rope(self, width):
        """There transformers turns all keys by other angles."""
        rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
        config = Phi3Config(**COMMON, original_max_position_embeddings=32, rope_parameters=rope)
        torch.manual_seed(0)
        target = AutoModelForCausalLM.from_config(config).eval()
        options = NEW | {"max_new_tokens": 40}
        want = target.generate(**batch((width,)), **options)
        with patch(target, weaken(target)), pytest.warns(UserWarning, match="beyond the context of 32"):
            assert torch.equal(target.generate(**batch((width,)), **options), want)

    @pytest.mark.parametrize("name", FORGETS_NOTHING)
    def test_a_model_whose_cache_cannot_be_rolled_back(self, pair, name):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FORGETS_NOTHING[name]()).eval()
        ids = torch.tensor([[5, 6, 7]])
        want = model.generate(ids, **NEW)
        with patch(model, "ngram"), pytest.warns(UserWarning, match="rolled back"):
            assert torch.equal(model.generate(ids, **NEW), want)
        with pytest.raises(ValueError, match="rolled back"):
            patch(pair[0], model)

    @pytest.mark.parametrize("patched_inside", [False, True])
    def test_under_autocast(self, pair, patched_inside):
        target, draft = pair
        with torch.autocast("cpu", torch.bfloat16):
            want = target.generate(**batch(), **NEW)
        with contextlib.ExitStack() as stack:
            contexts = [lambda: patch(target, draft), lambda: torch.autocast("cpu", torch.bfloat16)]
            for enter in reversed(contexts) if patched_inside else contexts:
                stack.enter_context(enter())
            with pytest.warns(UserWarning, match="autocast"):
                assert torch.equal(target.generate(**batch(), **NEW), want)

    def test_an_encoder_decoder_model(self, pair):
        config = T5Config(
            vocab_size=61, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        t5 = T5ForConditionalGeneration(config).eval()
        ids = torch.tensor([[5, 6, 7]])
        want = t5.generate(ids, **NEW)
        with patch(t5, pair[1]), pytest.warns(UserWarning, match="encoder-decoder"):
            assert torch.equal(t5.generate(ids, **NEW), want)

    def test_training_mode(self):
        target = build("llama")
        with patch(target, weaken(target)):
            target.train()
            with pytest.warns(UserWarning, match="training mode"):
                target.generate(**batch(), **NEW)

    def test_a_callers_own_loop_runs(self, pair):
        target, draft = pair
        with patch(target, draft):
            assert target.generate(**batch(), **NEW, custom_generate=lambda model, input_ids, **_: "own") == "own"

    def test_a_decoder_names_what_it_cannot_hand_back(self, pair):
        target, draft = pair
        with pytest.raises(ValueError, match="beam search"):
            target.generate(**batch(), **NEW, num_beams=2, custom_generate=Decoder(draft))


class TestFailures:
    def test_an_exception_on_a_prefix_that_is_never_reached_changes_nothing(self, pair):
        """Drafts of prompt lookup go where the caller's grammar ends."""
        target, _ = pair
        text = [10, 11, 12, 13, 14]
        prompt = torch.tensor([[10, 11, 30, 31, 10, 11, 30]])

        def allowed(_, ids):
            written = ids.tolist()[7:]
            return text[len(written) : len(written) + 1] if written == text[: len(written)] else []

        options = NEW | {"max_new_tokens": 5, "prefix_allowed_tokens_fn": allowed}
        with patch(target, "ngram", controller="static-4") as patched:
            assert target.generate(prompt, **options)[0, 7:].tolist() == text
            assert patched.decoder.prepare(target).stats()["drafted"] > 0

    @pytest.mark.parametrize("sampled", [False, True])
    def test_a_grammar_may_allow_nothing_behind_its_end(self, pair, sampled):
        target, draft = pair
        path = {3: [10], 4: [11], 5: [2]}
        options = {"max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": 2, "do_sample": sampled}
        for allowed in (lambda _, ids: path[len(ids)], lambda _, ids: path.get(len(ids), [])):
            with patch(target, draft, controller="static-4"):
                got = target.generate(torch.tensor([[5, 6, 7]]), **options, prefix_allowed_tokens_fn=allowed)
            assert got[0, 3:].tolist() == [10, 11, 2]

    def test_the_exception_of_a_processor_reaches_the_caller(self, pair):
        target, draft = pair

        def broken(ids, scores):
            raise LookupError("no such word")

        with patch(target, draft) as patched:
            with pytest.raises(LookupError, match="no such word") as caught:
                target.generate(**batch(), **NEW, logits_processor=LogitsProcessorList([broken]))
            if sys.version_info >= (3, 11):  # says where, since its traceback is gone
                assert caught.value.__notes__ == [f"raised at {__file__}:{broken.__code__.co_firstlineno + 1}"]
            engine = patched.decoder.prepare(target)
            assert engine.stats()["free_blocks"] == engine.stats()["blocks"]
            target.generate(**batch(), **NEW)

    def test_a_call_from_within_is_refused(self, pair):
        target, draft = pair

        def inner(ids, scores):
            target.generate(ids, **NEW)

        with patch(target, draft), pytest.raises(RuntimeError, match="within"):
            target.generate(**batch(), **NEW, logits_processor=LogitsProcessorList([inner]))

    def test_logits_without_a_finite_value(self, pair):
        target, draft = pair

        def mask_all(ids, scores):
            return torch.full_like(scores, -torch.inf)

        with patch(target, draft), pytest.raises(RuntimeError, match="NaN or hold no finite"):
            target.generate(**batch(), **NEW, logits_processor=LogitsProcessorList([mask_all]))
