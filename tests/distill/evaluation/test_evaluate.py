"""Which drafts are timed, and at which lengths."""

from types import SimpleNamespace

from distill.config.settings import EvaluationSettings
from distill.evaluation.evaluate import Evaluation


def test_every_draft_is_timed_at_its_own_best_length_and_the_final_one_at_those_asked_for_too() -> None:
    evaluation = Evaluation.__new__(Evaluation)  # without the models of a run
    evaluation.settings = EvaluationSettings(draft_lengths=[2, 9], temperatures=[0.0, 1.0])
    evaluation.run = SimpleNamespace(names={"initial": "undistilled", "reference": "distillspec", "draft": "kl-tv"})
    evaluation.comparisons = {"adaspec": "adaspec", "more-data": "adaspec"}
    best = {"undistilled": 3, "distillspec": 5, "kl-tv": 6, "adaspec": 0, "more-data": 4}
    timed = {
        (c.draft, c.options.draft_length, c.temperature) for c in evaluation._entries({"best_draft_lengths": best})
    }
    wanted = {("undistilled", 3), ("distillspec", 5), ("adaspec", 1), ("kl-tv", 2), ("kl-tv", 6), ("kl-tv", 9)}
    assert timed == {(*pair, temperature) for pair in wanted for temperature in (0.0, 1.0)}
