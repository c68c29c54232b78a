import pytest

from decode.bench.scorers import final_number, letter_score, number_score, rouge_score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5+5=10\n#### 10", "10"),
        ("The final answer is: $1,234.50.", "1234.5"),
        ("The final answer is:  -7\n\nWait, 8.", "-7"),
        ("#### 3 and then #### 4", "4"),
        ("It costs 12 dollars, or 13.", "13"),
        ("half: .5", "0.5"),
        ("no digits", None),
    ],
)
def test_the_final_number_is_found(text, number):
    found = final_number(text)
    assert found is None if number is None else found == final_number(number)


def test_numbers_are_compared_by_value():
    assert number_score("#### 3", "The final answer is: 3.00") == 1.0
    assert number_score("#### 3", "The final answer is: 30") == 0.0
    assert number_score("none", "none") == 0.0


@pytest.mark.parametrize(
    ("output", "score"),
    [(" B", 1), ("B. four", 1), ("(B)", 1), ("The answer is B", 1), ("A careful look: the answer is (B)", 1),
     ("The answer is a bee, so B", 1), ("The answer is b.", 1), ("Answer: b\nSince A", 1),
     (" C", 0), ("Because", 0), ("", 0)],
)  # fmt: skip
def test_the_chosen_letter_counts(output, score):
    assert letter_score(" B", output) == score


def test_rouge_agrees_with_values_worked_out_by_hand():
    assert rouge_score("The cat sat on the mat.", "the cat lay on a mat") == pytest.approx(4 / 6)
    assert rouge_score("b a", "a b") == pytest.approx(1 / 2)
    assert rouge_score("same words", "Same words!") == 1.0
    assert rouge_score("", "anything") == 0.0
