import re

import pytest
from solutions import check_solution

from decode.bench import arithmetic
from decode.bench.arithmetic import SIZES, problem, problems, split_of
from decode.errors import UserError

SPLITS = ("train", "validation", "test")


@pytest.mark.parametrize("difficulty", [1, 2, 3])
@pytest.mark.parametrize("split", SPLITS)
def test_every_calculator_mark_is_right_and_the_last_one_is_the_answer(difficulty, split):
    for made in problems(7, split, 1500, difficulty):
        assert check_solution(made.solution) == made.answer
        assert made.solution.count("<<") == made.steps
        assert made.solution.endswith(f"\n#### {made.answer}")


@pytest.mark.parametrize(
    "wrong",
    [
        "Tom has 2+2 = <<2+2=5>>5 pens.\n#### 5",
        "Tom has 2+2 = <<2+2=4>>5 pens.\n#### 4",
        "Tom has 2+2 = <<2+2=4>>4 pens.\n#### 5",
        "Tom has 7/2 = <<7/2=3>>3 pens.\n#### 3",
        "Tom has 4 pens.\n#### 4",
        "Tom has 2+2 = <<2+2=4>>4 and <<x>>4 pens.\n#### 4",
    ],
)
def test_the_check_of_solutions_refuses_wrong_ones(wrong):
    with pytest.raises(ValueError, match="in 'Tom has"):
        check_solution(wrong)


def test_no_question_is_in_two_splits_for_any_seed_or_difficulty():
    questions = {split: set() for split in SPLITS}
    for split in SPLITS:
        for seed in (0, 1, 2):
            for difficulty in (1, 2, 3):
                questions[split] |= {p.question for p in problems(seed, split, 700, difficulty)}
        assert all(split_of(question) == split for question in questions[split])
    assert not questions["train"] & questions["test"]
    assert not questions["train"] & questions["validation"]
    assert not questions["validation"] & questions["test"]


def test_a_problem_depends_on_its_seed_split_index_and_difficulty_only():
    again = [problem(3, "test", index, 2) for index in (5, 0, 9)]
    assert [list(problems(3, "test", 10, 2))[index] for index in (5, 0, 9)] == again
    assert problem(3, "test", 5, 2) != problem(4, "test", 5, 2)
    assert problem(3, "test", 5, 2) != problem(3, "test", 6, 2)
    assert problem(3, "test", 5, 2) != problem(3, "test", 5, 3)


def test_the_split_of_a_question_never_changes_with_the_process():
    splits = "validation train train train test test train validation"
    assert [split_of(f"How many pens are there? {i}") for i in range(8)] == splits.split()


def test_difficulty_bounds_results_and_steps():
    for difficulty, size in SIZES.items():
        made = list(problems(0, "train", 1500, difficulty))
        results = [int(r) for p in made for r in re.findall(r"=(\d+)>>", p.solution)]
        assert min(results) >= 2
        assert max(results) <= size.limit
        assert {p.steps for p in made} == set(size.steps)
    assert max(p.steps for p in problems(0, "test", 500, 1)) == 2
    assert max(p.steps for p in problems(0, "test", 500, 3)) == 4


def test_there_are_many_wordings_and_few_words():
    """Patterns: a question with its names, things, places, days and numbers taken out."""
    words = arithmetic._words()
    names = [name for name, _ in words.people] + words.places + words.days + words.containers + words.items
    known = re.compile(rf"\b(?:{'|'.join(names)})s?\b|\d+|\b(?:he|she|his|her|him)\b", re.IGNORECASE)
    made = list(problems(0, "train", 4000, 1))
    assert len({known.sub("_", p.question) for p in made}) > 300
    assert sum(len(scenes) for scenes in words.scenes.values()) >= 40
    assert len({word.strip(".,?$") for p in made for word in p.question.split() if word[0].isalpha()}) < 400


def test_numbers_names_and_things_of_the_question_come_back_in_the_solution():
    made = list(problems(0, "train", 500, 1))
    shared = [set(re.findall(r"\w+", p.question)) & set(re.findall(r"\w+", p.solution)) for p in made]
    assert all(len(words) >= 3 for words in shared)
    assert all(any(word.isdigit() for word in words) for words in shared)


def test_texts_are_complete_sentences_without_left_over_templates():
    for difficulty in (1, 2, 3):
        for made in problems(1, "train", 1000, difficulty):
            assert not re.search(r"[{}\[\]|()]|  ", made.question + made.solution)
            assert made.question.endswith("?")
            assert made.question[0].isupper() or made.question[0].isdigit()
            assert not re.search(r"(?<![\d$+*/-])1 [a-z]", made.solution.replace("#### ", ""))


@pytest.mark.parametrize(("split", "difficulty", "said"), [("dev", 1, "'dev'"), ("train", 4, "difficulty 4")])
def test_an_unknown_split_or_difficulty_is_named(split, difficulty, said):
    with pytest.raises(UserError, match=said):
        problem(0, split, 0, difficulty)
