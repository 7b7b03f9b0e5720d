"""Final answers and tests of code."""

import pytest

from jetflow.benchmark.accuracy import final_answer, passes_tests, same_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("16 - 3 = 13\n#### 1,300\n", "1,300"),
        ("He has 3 apples, then 12.", "12"),
        ("It is -4.5 degrees", "-4.5"),
        ("No number here", None),
        (r"cut off \boxed{3", "3"),
    ],
)
def test_final_answers(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("found", "reference", "same"),
    [
        ("18", "18", True),
        ("18.0", "18", True),
        ("1,300", "1300", True),
        ("$18", "18", True),
        (r"\dfrac{3}{4}", "0.75", True),
        (r"\frac34", r"\frac{3}{4}", True),
        ("x=5", "5", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        (r"50\%", "50", True),
        ("18", "19", False),
        (None, "1", False),
        (r"\frac{1}{0}", "1", False),
        ("x+1", "x+2", False),
    ],
)
def test_same_answers(found, reference, same):
    assert same_answer(found, reference) == same


def test_code_is_run_with_its_tests():
    answer = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nIt doubles."
    assert passes_tests(answer, ["assert double(2) == 4"])
    assert not passes_tests(answer, ["assert double(2) == 5"])
    assert passes_tests("def one():\n    return 1", ["assert one() == 1"])


@pytest.mark.parametrize("code", ["while True: pass", "x = [0] * 10**10", "def broken(:", "raise SystemExit(1)"])
def test_code_that_runs_away_fails_soon(code):
    assert not passes_tests(f"```python\n{code}\n```", ["pass"], seconds=2)
