import json
import re

import pytest
import torch
from conftest import SMALL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from jetflow import BlockDraftHead, DraftHeadConfig, save_head
from jetflow.cli import main


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random target with a byte-level tokenizer, and a random head, laid out as the demo expects them."""
    folder = tmp_path_factory.mktemp("pair")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", "<mask>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(special + alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", mask_token="<mask>", bos_token="<s>"
    )
    fast.chat_template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    fast.save_pretrained(folder / "target")
    torch.manual_seed(0)
    config = Qwen3Config(**{**SMALL, "vocab_size": len(fast)}, head_dim=16)
    Qwen3ForCausalLM(config).save_pretrained(folder / "target")
    head_config = DraftHeadConfig.for_target(config, num_layers=1, block_size=5, mask_token_id=3, taps=(0, 2))
    save_head(BlockDraftHead(head_config), folder / "head")
    rows = [{"id": f"p{i}", "kind": "test", "prompt": text} for i, text in enumerate(["ab ab ab", "hello hello"])]
    (folder / "heldout.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def target_of(pair):
    return ["--target", str(pair / "target"), "--dtype", "float32", "--max-new-tokens", "12"]


def test_generate_prints_the_same_ids_with_every_drafter(pair, capsys):
    outputs = []
    for drafter in (
        ["--drafter", "none"],
        ["--drafter", "lookup"],
        ["--head", str(pair / "head")],
        ["--head", str(pair / "head"), "--expander", "fanout", "--width", "3", "--budget", "9"],
        ["--head", str(pair / "head"), "--expander", "chain"],
    ):
        assert main(["generate", *target_of(pair), *drafter, "--prompt", "ab ab", "--json"]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert len({tuple(output["token_ids"]) for output in outputs}) == 1
    assert outputs[0]["tau"] == 1.0


def test_generate_streams_and_reads_prompt_files(pair, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["one", "two"]}\n{"prompt": "three"}\n')
    arguments = ["generate", *target_of(pair), "--drafter", "lookup", "--prompts-file", str(file), "--chat"]
    assert main(arguments) == 0
    assert len(re.findall(r"\[12 tokens, tau", capsys.readouterr().err)) <= 2
    assert main([*arguments, "--json", "--num-prompts", "1"]) == 0
    (alone,) = capsys.readouterr().out.splitlines()
    assert main([*arguments, "--json", "--batch-size", "3"]) == 0
    ids = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    assert len(ids) == 2
    assert ids[0] == json.loads(alone)["token_ids"]
    assert main([*arguments, "--batch-size", "2"]) == 2
    assert "above 1 it needs --json, got 2" in capsys.readouterr().err


def test_prompt_files_may_hold_blank_lines_and_any_separator(pair, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    # U+2028 may stand unescaped inside a JSON string, and ends a line for str.splitlines.
    file.write_text('{"prompt": "a\u2028b"}\n\n{"turns": ["c"]}\n', encoding="utf-8")
    assert main(["generate", *target_of(pair), "--drafter", "none", "--prompts-file", str(file), "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("content", ['{"prompt": "a"}\n{"prompt": 3}', '{"prompt": "a"}\n[1]', '{"prompt": "a"}\n{', "\n"])
def test_bad_prompt_files_name_the_line(pair, tmp_path, capsys, content):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert main(["generate", *target_of(pair), "--drafter", "none", "--prompts-file", str(file)]) == 2
    assert ("holds no prompts" if content == "\n" else f"{file}, line 2: ") in capsys.readouterr().err


def test_sampling_is_repeatable(pair, capsys):
    outputs = []
    for seed in ("1", "1", "2"):
        sampled = ["--temperature", "2", "--top-p", "0.95", "--seed", seed]
        main(["generate", *target_of(pair), "--drafter", "lookup", "--prompt", "ab", "--json", *sampled])
        outputs.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_rules_with_drawn_trees_are_repeatable(pair, capsys, rule):
    arguments = ["generate", *target_of(pair), "--head", str(pair / "head"), "--prompt", "ab ab", "--json", "--rule", rule]
    outputs = []
    for seed in ("3", "3", "4"):
        assert main([*arguments, "--temperature", "1.0", "--seed", seed]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert outputs[0] == outputs[1] != outputs[2]
    assert main(arguments) == 2
    assert f"--rule {rule} draws trees from a head" in capsys.readouterr().err


def test_inspect_draws_the_tree_of_a_round(pair, capsys):
    arguments = ["inspect", *target_of(pair), "--head", str(pair / "head"), "--prompt", "ab", "--budget", "6"]
    assert main([*arguments, "--round", "1"]) == 0
    out = capsys.readouterr().out
    assert "6 nodes" in out
    assert "the target's own" in out
    assert main([*arguments, "--round", "99"]) == 2
    assert "--round 99 must be in" in capsys.readouterr().err


def test_demo_compares_the_texts(pair, capsys):
    arguments = ["demo", "--models", str(pair), "--prompts", "2", "--budget", "6", "--max-new-tokens", "10"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for method in ("autoregressive", "prompt lookup", "JetFlow, budget 6"):
        assert out.count(method) >= 3
    assert "All texts are equal" in out
    assert "in [brackets]" in out
    assert "speedup" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--target", "T", "--drafter", "lookup"], "--prompt"),
        (["generate", "--target", "T", "--prompt", "x"], "--head"),
        (["generate", "--target", "T", "--prompt", "x", "--head", "h", "--drafter", "lookup"], "exclude each other"),
        (
            ["generate", "--target", "T", "--prompt", "x", "--drafter", "lookup", "--width", "3"],
            "--expander, --width, --frequent-tokens and --passes are for heads",
        ),
        (["generate", "--target", "T", "--prompt", "x", "--drafter", "lookup", "--budget", "0"], "budget must be at least 1"),
        (["generate", "--target", "T", "--prompt", "", "--drafter", "lookup"], "at least one token"),
        (["generate", "--target", "T", "--prompt", "x", "--head", "/absent"], "neither a folder nor a hub name"),
        (["generate", "--target", "T", "--prompt", "x", "--head", "H", "--expander", "beam"], "needs --width"),
        (["generate", "--target", "T", "--prompt", "x", "--head", "H", "--width", "3"], "belongs to the expanders"),
        (["generate", "--target", "T", "--prompt", "x", "--drafter", "lookup", "--attention", "fast"], "must be one of"),
        (["generate", "--target", "T", "--prompt", "x", "--drafter", "lookup", "--prompts-file", "f"], "exclude each other"),
        (
            ["generate", "--target", "T", "--prompts-file", "f", "--drafter", "lookup", "--num-prompts", "0"],
            "--num-prompts must",
        ),
        (
            ["generate", "--target", "T", "--prompt", "x", "--drafter", "none", "--num-prompts", "2"],
            "belongs to --prompts-file",
        ),
        (["generate", "--target", "T", "--prompt", "x", "--drafter", "lookup", "--top-k", "3"], "--temperature above 0"),
        (["generate", "--target", "/absent/target", "--prompt", "x", "--drafter", "lookup"], "/absent/target"),
        (["demo", "--models", "absent"], "holds no tiny pair"),
    ],
)
def test_mistakes_are_one_line(pair, capsys, arguments, message):
    places = {"T": str(pair / "target"), "H": str(pair / "head")}
    assert main([places.get(argument, argument) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("jetflow: error:") == 1
    assert err.count("\n") == 1


def test_long_errors_become_one_line(pair, capsys, monkeypatch):
    def fail(*args, **settings):
        raise OSError("no such model\n  in the hub\nor here")

    monkeypatch.setattr("jetflow.targets.Target.from_pretrained", fail)
    assert main(["generate", *target_of(pair), "--drafter", "lookup", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == "jetflow: error: no such model in the hub or here\n"
