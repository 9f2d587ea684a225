"""Test the counters that every engine returns, and how drafts are printed."""

from sparrow.cli.terminal import print_drafts
from sparrow.engines.base import Counters


def test_steps_of_guesses_alone_report_their_guesses_and_no_passes():
    counters = Counters(1, 4, drafted=8, accepted=3, cycles=2, guessed=8)
    drafts = counters.to_dict()["drafts"]
    assert (drafts["guessed"], drafts["passes"], drafts["drafts_per_pass"]) == (8, 0, 0.0)


def test_counters_without_guesses_report_neither_guesses_nor_passes():
    drafts = Counters(1, 4, drafted=8, accepted=3, cycles=2).to_dict()["drafts"]
    assert not {"guessed", "passes", "drafts_per_pass"} & drafts.keys()


def test_printed_drafts_are_those_whose_acceptance_was_measured(capsys):
    bins = [{"start": 0, "end": 2000, "drafts": 5, "mean": 0.9, "p5": 0.8}]
    drafts = Counters(1, 4, drafted=8, accepted=3, cycles=2).to_dict()["drafts"]
    print_drafts({**drafts, "bins": bins})
    assert "exact acceptance of 5 drafts" in capsys.readouterr().out
