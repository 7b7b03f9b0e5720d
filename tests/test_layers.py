"""The layers of docs/design.md, and what `import jetflow` may load."""

import ast
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "jetflow"
# The longest matching name counts.
LEVELS = {
    "protocols": 0,
    "trees.token_tree": 1,
    "trees": 2,
    "masks": 2,
    "scoring": 2,
    "losses": 2,
    "acceptors": 2,
    "budgets": 2,
    "kernels": 2,
    "graphs": 2,
    "chat": 2,
    "jsonl": 2,
    "stopping": 2,
    "timing": 2,
    "processing": 2,
    "logprobs": 2,
    "heads": 3,
    "caches": 3,
    "paged_cache": 3,
    "targets": 3,
    "target_checks": 3,
    "tree_pass": 3,
    "verifiers": 3,
    "drafters": 3,
    "results": 3,
    "generation": 3,
    "request": 3,
    "batch": 3,
    "decoding": 4,
    "certificate": 5,
    "training": 4,
    "benchmark": 5,
    "demo": 5,
    "cli": 5,
}
# Parts of one level that belong together: expanders default to a scoring function; the target hands out its cache, the
# verifier and the drafters stand on the target and on heads; training measures tau by decoding; the demo and the command
# line stand on the comparison.
WITHIN_LEVEL = {
    ("trees", "scoring"),
    ("acceptors", "scoring"),
    ("acceptors", "kernels"),
    ("trees", "kernels"),
    ("kernels", "trees"),
    ("graphs", "kernels"),
    ("acceptors", "trees"),
    ("targets", "caches"),
    ("targets", "target_checks"),
    ("targets", "paged_cache"),
    ("paged_cache", "caches"),
    ("verifiers", "targets"),
    ("verifiers", "target_checks"),
    ("verifiers", "tree_pass"),
    ("verifiers", "caches"),
    ("verifiers", "paged_cache"),
    ("drafters", "targets"),
    ("drafters", "heads"),
    ("drafters", "verifiers"),
    ("generation", "targets"),
    ("request", "targets"),
    ("request", "generation"),
    ("batch", "request"),
    ("batch", "results"),
    ("batch", "targets"),
    ("batch", "verifiers"),
    ("request", "results"),
    ("training", "decoding"),
    ("demo", "benchmark"),
    ("cli", "demo"),
    ("cli", "certificate"),
    ("cli", "benchmark"),
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def level_of(name: str) -> int:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in LEVELS:
            return LEVELS[".".join(parts[:length])]
    raise AssertionError(f"{name} stands on no level; add it to LEVELS and to docs/design.md")


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("jetflow.") for alias in node.names if alias.name.startswith("jetflow.")}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute, so that this test can read them"
            if node.module == "jetflow":
                names |= {alias.name for alias in node.names if alias.name != "__version__"}
            elif node.module.startswith("jetflow."):
                names.add(node.module.removeprefix("jetflow."))
    return names


def test_imports_point_down():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        name = name_of(path)
        if name in ("__init__", "__main__"):
            continue
        for imported in imports_of(path):
            same_folder = name.split(".")[0] == imported.split(".")[0]
            pair = (name.split(".")[0], imported.split(".")[0])
            allowed = same_folder or pair in WITHIN_LEVEL or level_of(imported) < level_of(name)
            # The tree type is needed to describe the contracts; it is imported for type checkers only.
            if not allowed and (name, imported) != ("protocols", "trees.token_tree"):
                wrong.append(f"{name} imports {imported}")
    assert not wrong, wrong


def test_files_stay_small():
    long = {name_of(path): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert not {name: lines for name, lines in long.items() if lines > 320}


def test_importing_jetflow_loads_neither_transformers_nor_triton():
    code = "import sys, jetflow; print(sorted({'transformers', 'triton'} & set(sys.modules)))"
    begin = time.perf_counter()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Shown with `pytest -rP`; never a reason to fail, as the machine may be busy.
    print(f"import jetflow: {time.perf_counter() - begin:.2f} s with the start of Python")
    assert out.stdout.strip() == "[]"


def test_every_public_name_resolves():
    import jetflow

    for name in jetflow.__all__:
        assert getattr(jetflow, name) is not None
