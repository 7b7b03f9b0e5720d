"""`jetflow bench` on the tiny pair: records, tables, plots, refusals, and going on after a stop."""

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from jetflow.benchmark.datasets import read_dataset
from jetflow.benchmark.plots import published
from jetflow.benchmark.tables import accuracies, figures_of, markdown, read_results
from jetflow.cli import main

TINY = Path(__file__).parents[2] / "models" / "tiny"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two files of three conversations, the second with two turns."""
    folder = tmp_path_factory.mktemp("data")
    prompts = [json.loads(line)["prompt"] for line in (TINY / "heldout.jsonl").read_text().splitlines()[:6]]
    one, two = folder / "one.jsonl", folder / "two.jsonl"
    one.write_text("\n".join(json.dumps({"id": f"a{i}", "turns": [text]}) for i, text in enumerate(prompts[:3])))
    two.write_text("\n".join(json.dumps({"id": f"b{i}", "turns": [text, "Go on."]}) for i, text in enumerate(prompts[3:])))
    return [str(one), str(two)]


HEAD = ("--head", str(TINY / "head"))


def bench(data, out, *more, head=HEAD):
    arguments = ["--target", str(TINY / "target"), "--max-new-tokens", "24", "--dtype", "float32", *head]
    return main(["bench", *arguments, "--data", *data, "--count", "2", "--out", str(out), *more])


@pytest.fixture(scope="module")
def results(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("results") / "run.jsonl"
    methods = ["plain", "head", "lookup", "merged", "hf", "hf-lookup"]
    assert bench(data, out, "--methods", *methods, "--budgets", "4", "8") == 0
    return out


def test_every_text_of_every_method_is_recorded_once(results):
    settings, records = read_results([results])
    assert settings["methods"] == [
        "plain", "head@4", "head@8", "lookup@4", "lookup@8", "merged@4", "merged@8", "hf", "hf-lookup",
    ]  # fmt: skip
    keys = [(one["dataset"], one["task"], one["turn"], one["method"]) for one in records]
    assert len(keys) == len(set(keys)) == 9 * (2 + 4)


def test_figures_say_what_the_records_hold(results):
    settings, records = read_results([results])
    figures = {(one.dataset, one.method): one for one in figures_of(settings, records)}
    plain, head = figures["one", "plain"], figures["one", "head@8"]
    assert (plain.speedup, plain.tau, plain.speedup_interval) == (1.0, 1.0, (1.0, 1.0))
    mine = [one for one in records if (one["dataset"], one["method"]) == ("one", "head@8")]
    assert head.tau == sum(sum(one["kept"]) for one in mine) / sum(len(one["kept"]) for one in mine)
    assert head.tau_interval[0] <= head.tau <= head.tau_interval[1]
    assert head.speedup_interval[0] <= head.speedup <= head.speedup_interval[1]
    assert (head.texts_equal, head.num_texts) == (2, 2)
    assert 0 < head.outside_share < 1
    assert abs(sum(head.ranks) - 1) < 1e-9
    assert head.accepted_by_depth == sorted(head.accepted_by_depth, reverse=True)
    assert figures["one", "hf"].tau is None
    assert "| head@8 |" in markdown(list(figures.values()))


def test_a_head_makes_chains_and_the_published_trees(data, tmp_path):
    out = tmp_path / "run.jsonl"
    assert bench(data[:1], out, "--methods", "plain", "head-chain", "head-fanout", "--budgets", "4") == 0
    settings, records = read_results([out])
    assert settings["methods"] == ["plain", "head-chain@4", "head-fanout@4"]
    for one in records:
        # A chain has one child per node; of four nodes the published tree has the root and three of its children.
        if one["method"] == "head-chain@4":
            assert len(one["ranks"]) <= 1
            assert max(one["accepted"]) > 1
        if one["method"] == "head-fanout@4":
            assert max(one["accepted"]) <= 1


def test_several_heads_are_told_apart(data, results, tmp_path, capsys):
    chain = tmp_path / "other"
    shutil.copytree(TINY / "head", chain)
    out = tmp_path / "run.jsonl"
    heads = ["--head", str(TINY / "head"), str(chain), "--methods", "plain", "head", "head-chain", "--budgets", "4"]
    assert bench(data[:1], out, *heads, "--max-new-tokens", "4") == 0
    settings, _ = read_results([out])
    assert settings["head"] == "head, other"
    assert settings["head_fingerprints"]["head"] == settings["head_fingerprints"]["other"]
    assert settings["methods"] == ["plain", "head:head@4", "head:other@4", "head-chain:head@4", "head-chain:other@4"]
    same = ["--head", str(chain), str(chain)]
    assert bench(data[:1], tmp_path / "x.jsonl", *same) == 2
    assert "several --head need folders of different names" in capsys.readouterr().err

    def other_head(lines):
        lines[0]["settings"]["head"] = "other"

    def trained_on(lines):
        lines[0]["settings"]["head_fingerprints"] = {"head": "0" * 16}

    for change in (other_head, trained_on):
        with pytest.raises(ValueError, match="both hold head@4, but of different heads"):
            read_results([results, damaged(results, tmp_path / "other.jsonl", change)])


def test_a_run_does_not_go_on_with_other_weights_under_the_same_name(data, tmp_path, capsys):
    folder, out = tmp_path / "head", tmp_path / "run.jsonl"
    shutil.copytree(TINY / "head", folder)
    short = ["--head", str(folder), "--methods", "plain", "head", "--budgets", "4", "--max-new-tokens", "2"]
    assert bench(data[:1], out, *short) == 0
    weights = load_file(folder / "model.safetensors")
    save_file({name: 2 * value for name, value in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    assert bench(data[:1], out, *short) == 2
    assert "was written with head_fingerprints=" in capsys.readouterr().err


EAGLE = str(Path(__file__).parents[1] / "data" / "eagle" / "safeai")
SIMULATED = ("--methods", "plain", "simulated", "--acceptance", "0.5")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [*HEAD, "--methods", "plain", "lookup"],
            "--head belongs to the methods head, head-chain, head-fanout, eagle, merged, sim",
        ),
        (
            ["--draft", str(TINY / "target"), *HEAD],
            "--draft belongs to the methods draft, hf-assisted; got --methods plain head",
        ),
        (["--methods", "plain", "lookup", "--passes", "2"], "--passes belongs to the methods head,"),
        ([*SIMULATED, "--passes", "2"], "--passes belongs to the methods head,"),
        (["--methods", "plain", "lookup", "--frequent-tokens", "1"], "--frequent-tokens belongs to the methods head,"),
        (["--methods", "plain", "hf", "--budgets", "8"], "--budgets belongs to the methods head,"),
        ([*HEAD, "--acceptance", "0.5"], "--acceptance belongs to the methods simulated; got --methods plain head"),
        ([*SIMULATED, "--head", EAGLE], "is an EAGLE-3 head; this needs a JetFlow or DFlash head"),
        ([*SIMULATED, *HEAD, str(TINY / "head")], "--methods simulated takes the sizes of one --head, got 2"),
        (
            ["--methods", "eagle", "--head", EAGLE, "--frequent-tokens", "8"],
            "--frequent-tokens is for JetFlow and DFlash heads",
        ),
        (["--methods", "head", *HEAD, EAGLE], f"--head {EAGLE} is read by none of --methods head"),
        ([*HEAD, "--run-code"], "--run-code belongs to --accuracy"),
        ([*HEAD, "--published", "JetSpec 64"], "--published JetSpec 64 draws lines into --plots, which is absent"),
        ([*HEAD, "--from", "some.jsonl"], "--target is for measuring; --from draws what was measured"),
    ],
)
def test_options_that_nothing_reads_are_refused(data, tmp_path, capsys, options, message):
    out = tmp_path / "run.jsonl"
    assert bench(data[:1], out, *options, head=()) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_simulated_acceptance_is_marked_and_stands_alone(data, results, tmp_path, capsys):
    out = tmp_path / "simulated.jsonl"
    assert bench(data[:1], out, "--methods", "plain", "simulated", "--acceptance", "0.5", "1", "--budgets", "8") == 0
    assert "No head was measured." in " ".join(capsys.readouterr().out.split())
    settings, records = read_results([out])
    assert settings["methods"] == ["plain", "simulated:0.5@8", "simulated:1@8"]
    assert settings["simulated_acceptance"] == [0.5, 1.0]
    figures = {one.method: one for one in figures_of(settings, records)}
    assert figures["plain"].tau < figures["simulated:0.5@8"].tau < figures["simulated:1@8"].tau
    assert figures["simulated:0.5@8"].texts_equal == figures["simulated:0.5@8"].num_texts
    assert all(value >= 0 for one in records for value in (one["seconds"], *one["phases"].values()))

    def renamed(lines):
        lines[0]["settings"]["methods"][1] = "simulated:0.5@4"

    with pytest.raises(ValueError, match=r"must not share a table, got simulated:0\.5@4 and head@8"):
        read_results([damaged(results, tmp_path / "renamed.jsonl", renamed)])
    mixed = ["--methods", "plain", "head", "simulated", "--acceptance", "0.5"]
    assert bench(data[:1], tmp_path / "mixed.jsonl", *mixed) == 2
    assert "simulated and measured methods must not share a table" in capsys.readouterr().err
    assert bench(data[:1], tmp_path / "mixed.jsonl", "--methods", "plain", "simulated") == 2
    assert "--methods simulated needs --acceptance" in capsys.readouterr().err
    warm = ["--methods", "plain", "simulated", "--acceptance", "0.5", "--temperature", "1"]
    assert bench(data[:1], tmp_path / "mixed.jsonl", *warm) == 2
    assert "simulated needs --temperature 0, got 1.0" in capsys.readouterr().err


def test_results_are_drawn_again_without_a_model(results, tmp_path, capsys):
    outputs = ["--plots", str(tmp_path), "--markdown", str(tmp_path / "t.md"), "--figures", str(tmp_path / "f.json")]
    assert main(["bench", "--from", str(results), *outputs]) == 0
    assert {one.name for one in tmp_path.iterdir()} == {"speedup.png", "acceptance.png", "budgets.png", "t.md", "f.json"}
    figures = json.loads((tmp_path / "f.json").read_text())["figures"]
    assert figures[0]["method"] == "plain"
    # Whole, on a terminal of 80 columns: every method of both files, and their means.
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in lines if row[:1] == ["lookup@8"]]
    mine = [one for one in figures if one["method"] == "lookup@8"]
    assert [row[1:4] for row in rows[:2]] == [
        [f"{one['tau']:.2f}", f"{one['tokens_per_second']:.1f}", f"{one['speedup']:.2f}x"] for one in mine
    ]
    mean = math.sqrt(mine[0]["speedup"] * mine[1]["speedup"])
    assert rows[2][1:] == [f"{sum(one['tau'] for one in mine) / 2:.2f}", f"{mean:.2f}x"]


def test_published_figures_are_lines_and_named(results, tmp_path, capsys):
    assert published("JetSpec 256", 0)["math500"] == 9.64
    assert published("DDTree 64", 1)["gsm8k"] == 5.28
    assert main(["bench", "--from", str(results), "--plots", str(tmp_path), "--published", "JetSpec 64"]) == 0
    assert main(["bench", "--from", str(results), "--plots", str(tmp_path), "--published", "JetSpec 65"]) == 2
    assert "no published figures of 'JetSpec 65' at temperature 0; there are EAGLE-3 16" in capsys.readouterr().err


def test_right_answers_are_counted(data, tmp_path, capsys):
    file = tmp_path / "sums.jsonl"
    rows = [{"id": 1, "turns": ["Tom has 3 apples."], "reference": "3"}, {"id": 2, "turns": ["Hi"], "tests": ["assert True"]}]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    assert bench([str(file)], tmp_path / "run.jsonl", "--methods", "plain", "--accuracy", head=()) == 0
    assert "sums, plain: " in capsys.readouterr().out
    _, records = read_results([tmp_path / "run.jsonl"])
    records[0]["text"], records[1]["text"] = "so it is 3", "x = 1"
    assert accuracies(records) == {("sums", "plain"): (1, 1)}
    assert accuracies(records, run_code=True) == {("sums", "plain"): (2, 2)}
    assert main(["bench", "--from", str(tmp_path / "run.jsonl"), "--run-code"]) == 2


def test_a_run_that_was_stopped_goes_on(data, results, tmp_path):
    whole = results.read_bytes()
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(whole[: len(whole) // 2])
    methods = ["plain", "head", "lookup", "merged", "hf", "hf-lookup"]
    assert bench(data, cut, "--methods", *methods, "--budgets", "4", "8") == 0
    before, after = (
        sorted((o["dataset"], o["task"], o["turn"], o["method"], tuple(o["token_ids"])) for o in read_results([p])[1])
        for p in (results, cut)
    )
    assert before == after
    # A file of other settings is not written to.
    assert bench(data, cut, "--methods", "plain", "head", "--budgets", "4") == 2


def damaged(results, path, change):
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_tables_are_refused_where_they_would_mislead(results, tmp_path):
    def other_text(lines):
        lines[3]["token_ids"] = [1, 2, 3]

    def missing(lines):
        del lines[5]

    def other_length(lines):
        lines[0]["settings"]["max_new_tokens"] = 25

    def other_data(lines):
        lines[0]["settings"]["datasets"]["one"] = "0" * 16

    with pytest.raises(ValueError, match="is not that of plain decoding"):
        read_results([damaged(results, tmp_path / "a.jsonl", other_text)])
    with pytest.raises(ValueError, match=r"no text of .*; run the benchmark to its end"):
        read_results([damaged(results, tmp_path / "b.jsonl", missing)])
    with pytest.raises(ValueError, match="has max_new_tokens=25, but"):
        read_results([results, damaged(results, tmp_path / "c.jsonl", other_length)])
    with pytest.raises(ValueError, match="has datasets="):
        read_results([results, damaged(results, tmp_path / "d.jsonl", other_data)])
    (tmp_path / "e.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="holds no settings in its first line"):
        read_results([tmp_path / "e.jsonl"])


def test_datasets(data, tmp_path):
    one = read_dataset(data[0], count=1, skip=1)
    assert [task.id for task in one.tasks] == ["a1"]
    assert one.digest != read_dataset(data[0], count=1).digest
    file = tmp_path / "gsm8k.jsonl"
    file.write_text('{"id": 1, "turns": ["How many?"], "reference": "3"}\n')
    task = read_dataset(str(file), published_templates=True).tasks[0]
    assert task.turns[0].startswith("How many?\n")
    assert "boxed" in task.turns[0]
    assert task.reference == "3"
    with pytest.raises(ValueError, match="is neither a file nor one of the benchmarks gsm8k"):
        read_dataset("nothing")
    with pytest.raises(ValueError, match="has no rows behind the first 3"):
        read_dataset(data[0], skip=3)
    file.write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match="line 1: a row needs turns"):
        read_dataset(str(file))


def test_what_is_missing_is_named(data, tmp_path, capsys):
    assert main(["bench", "--target", str(TINY / "target")]) == 2
    assert "--data is needed to measure" in capsys.readouterr().err
    arguments = ["bench", "--target", str(TINY / "target"), "--data", *data, "--out", str(tmp_path / "x.jsonl")]
    assert main([*arguments, "--methods", "head"]) == 2
    assert "--methods head need --head" in capsys.readouterr().err
    assert main([*arguments, "--methods", "draft"]) == 2
    assert "--methods draft and hf-assisted need --draft" in capsys.readouterr().err
