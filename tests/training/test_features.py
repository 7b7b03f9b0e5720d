"""Cached states: the same loss as states computed on the way, whole shards after a kill, and no mixing of targets."""

import json
import shutil

import pytest
import torch

pytest.importorskip("accelerate", reason="training needs jetflow[train]")

from small_run import TAPS, small_examples, small_head, small_target

from jetflow.losses import ForwardKL
from jetflow.training import StepSettings, block_loss
from jetflow.training import features as features_module
from jetflow.training.data import Example
from jetflow.training.features import FeatureStore, estimate_bytes, write_features
from jetflow.training.rows import TrainingRows

LENGTH = 16
# bfloat16 keeps 8 bits, so rounding moves a value by at most 2^-8 of it; a second rounding may tip to the other side.
BFLOAT16_STEP = 2**-7


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(features_module, "EXAMPLES_PER_SHARD", 5)
    monkeypatch.setattr(features_module, "TOKENS_PER_PASS", 40)


@pytest.fixture
def target():
    return small_target(torch.bfloat16)


def write(target, folder, **changes):
    given = {"taps": TAPS, "max_length": LENGTH} | changes
    return write_features(target, small_examples(), folder, **given)


@pytest.mark.parametrize("pack", [False, True], ids=["apart", "packed"])
def test_loss_from_disk_is_the_loss_from_the_target(target, tmp_path, pack):
    exact = small_target(torch.float32)
    write(exact, tmp_path)
    store = FeatureStore(tmp_path, exact, small_examples(), taps=TAPS, max_length=LENGTH)
    rows = TrainingRows(small_examples(), max_length=LENGTH, rows_per_step=6, num_anchors=4, pack=pack)
    head = small_head(exact)
    for step in range(3):
        epoch, found = rows.rows_of_step(step)
        anchored = rows.collate(found, epoch)
        given = {"anchors": anchored.anchors, "valid": anchored.valid, "settings": StepSettings(ForwardKL())}
        online = block_loss(head, exact, anchored.batch, **given).loss
        cached = block_loss(head, exact, anchored.batch, **given, states=store(anchored)).loss
        torch.testing.assert_close(cached, online, atol=0, rtol=2 * BFLOAT16_STEP)
    rounded = store(anchored)
    states = exact.features(anchored.batch.token_ids, TAPS, anchored.batch.document_ids)
    for row, documents in enumerate(anchored.documents):
        for _, begin, end in documents:
            for one, other in zip(rounded, states, strict=True):
                torch.testing.assert_close(one[row, begin:end], other[row, begin:end], atol=1e-5, rtol=BFLOAT16_STEP)


def test_bfloat16_target_loses_nothing(target, tmp_path):
    write(target, tmp_path)
    store = FeatureStore(tmp_path, target, small_examples(), taps=TAPS, max_length=LENGTH)
    rows = TrainingRows(small_examples(), max_length=LENGTH, rows_per_step=1, num_anchors=4)
    epoch, found = rows.rows_of_step(0)
    anchored = rows.collate(found, epoch)
    given = {"anchors": anchored.anchors, "valid": anchored.valid, "settings": StepSettings(ForwardKL())}
    head = small_head(target)
    online = block_loss(head, target, anchored.batch, **given).loss
    cached = block_loss(head, target, anchored.batch, **given, states=store(anchored)).loss
    # Passes of other widths differ in the last bits of bfloat16.
    torch.testing.assert_close(cached, online, atol=0, rtol=2 * BFLOAT16_STEP)


def test_killed_run_keeps_whole_shards(target, tmp_path):
    class KilledError(Exception):
        pass

    def kill(done, total):
        if done == 2:
            raise KilledError

    with pytest.raises(KilledError):
        write(target, tmp_path, on_shard=kill)
    with pytest.raises(ValueError, match="holds 2 of 5 shards; let `jetflow features` finish"):
        FeatureStore(tmp_path, target, small_examples(), taps=TAPS, max_length=LENGTH)
    assert write(target, tmp_path) == 3
    assert write(target, tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", *(f"shard-0000{i}.safetensors" for i in range(5))]


def test_size_is_known_before(target, tmp_path, monkeypatch):
    examples = [Example("a", [1] * 10, [(2, 10)]), Example("b", [1] * 50, [(2, 50)])]
    assert estimate_bytes(examples, num_taps=2, hidden_size=16, max_length=20) == (10 + 20) * 3 * 16 * 2
    write(target, tmp_path / "real")
    stored = sum(path.stat().st_size for path in (tmp_path / "real").glob("*.safetensors"))
    assert stored == pytest.approx(estimate_bytes(small_examples(), 2, 16, LENGTH), rel=0.1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(OSError, match=r"states of 24 examples take .* GB, but .* has 0\.0 GB left"):
        write(target, tmp_path / "full")
    assert not list((tmp_path / "full").glob("*.safetensors"))


def test_another_target_other_taps_or_examples_are_refused(target, tmp_path):
    write(target, tmp_path)
    other = small_target(torch.bfloat16)
    with torch.no_grad():
        other.model.get_input_embeddings().weight += 1
    given = {"taps": TAPS, "max_length": LENGTH}
    for wrong, changes, message in (
        (other, {}, "were written for target"),
        (target, {"taps": (0, 1)}, r"were written for taps \[0, 2\], not \[0, 1\]"),
        (target, {"max_length": 9}, "were written for max_length 16, not 9"),
    ):
        with pytest.raises(ValueError, match=message):
            FeatureStore(tmp_path, wrong, small_examples(), **(given | changes))
        with pytest.raises(ValueError, match=message):
            write(wrong, tmp_path, **changes)
    with pytest.raises(ValueError, match="were written for examples"):
        FeatureStore(tmp_path, target, small_examples(seed=1), **given)
    with pytest.raises(ValueError, match="holds no states; write them with `jetflow features`"):
        FeatureStore(tmp_path / "nothing", target, small_examples(), **given)
    assert json.loads((tmp_path / "index.json").read_text())["num_shards"] == 5
