import pytest
from conftest import make_model, plain_greedy

from jetflow import PromptLookupDrafter, SpeculativeDecoder, Target
from jetflow.benchmark.compare import compare


def test_compares_every_method_on_every_prompt():
    model = make_model("llama")
    target = Target(model)
    decoders = {f"budget {n}": SpeculativeDecoder(target, PromptLookupDrafter(), budget=n) for n in (1, 8)}
    prompts = [[5, 9, 5, 9, 5], [7, 7, 7]]
    plain, lookup = compare(decoders, prompts, max_new_tokens=20, repeats=2)
    assert (plain.name, plain.tau, plain.speedup) == ("budget 1", 1.0, 1.0)
    assert plain.speedup_interval == (1.0, 1.0)
    assert lookup.speedup_interval[0] <= lookup.speedup <= lookup.speedup_interval[1]
    assert plain.texts_equal == lookup.texts_equal == 2
    assert lookup.tau > 1.0
    rounds = [len(decoders["budget 8"].generate(prompt, max_new_tokens=20).rounds) for prompt in prompts]
    tokens = [len(plain_greedy(model, prompt, 20)) - 1 for prompt in prompts]
    assert lookup.tau == pytest.approx(sum(tokens) / sum(rounds))


def test_differences_are_counted():
    targets = [Target(make_model("llama", seed)) for seed in (0, 1)]
    decoders = {str(i): SpeculativeDecoder(target, PromptLookupDrafter()) for i, target in enumerate(targets)}
    assert compare(decoders, [[5, 9], [7]], max_new_tokens=20)[1].texts_equal == 0


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="compare needs"):
        compare({}, [[1]], max_new_tokens=3)
