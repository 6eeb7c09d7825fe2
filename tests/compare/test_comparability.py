"""Which runs may be compared, what is said of those that differ, and which runs are meant."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from efftrain_cli.compare.comparability import describe_differences
from efftrain_cli.compare.tables import key_table
from efftrain_cli.compare.verdicts import verdict_sentences
from efftrain_cli.foundation.errors import UsageError
from efftrain_cli.run.names import select_runs
from tests.compare.known_runs import PLD, SLW, of, verdict_of, write_pair
from tests.fake_runs import rows_of, write_run


def test_settings_in_another_order_are_one_recipe(root):
    write_run(root, "small", 0)
    recipe = write_run(root, "small", 1) / "recipe.toml"
    head, *sections = recipe.read_text().split("\n[")
    recipe.write_text("\n[".join([head, *reversed(sections)]))
    assert [sorted(group.by_seed) for group in of("small").groups] == [[0, 1]]


def test_recipe_differences_are_exactly_the_keys_that_differ(root):
    write_run(root, "small", 0)
    write_run(root, "small-slw", 0, lr=2e-3, more=SLW + '\n[wandb]\nmode = "offline"\n')
    comparison = of("small", "small-slw")
    assert comparison.recipe_differences == {
        "optim.lr": [0.001, 0.002],
        "seq_len_warmup.start": [None, 8],
        "seq_len_warmup.steps": [None, 10],
    }
    assert [label.text for label in comparison.labels] == [
        "different optim.lr: small 0.001, small-slw 0.002"
    ]


def test_settings_of_a_recipe_are_told_apart_by_their_letters(root):
    write_run(root, "small", 0, lr=2e-3)
    write_run(root, "small", 0, lr=1e-3, name="slow")
    write_run(root, "small-slw", 0, more=SLW)
    labels = of("small", "small-slw", every_setting=True, baseline="slow").labels
    assert "different optim.lr: A 0.001, B 0.002, C 0.001" in [label.text for label in labels]


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ({"valid_hash": "d" * 64}, "the validation text differs"),
        ({"tokenizer_hash": "d" * 64}, "the tokenizer differs"),
        ({"valid_windows": 32}, "number of validation windows differs"),
        ({"seq_len": 64}, "length of a validation window differs"),
        ({"valid_hash": None}, "the validation text of small-slw-seed0 is unknown"),
    ],
)
def test_incomparable_runs_are_refused_or_labelled(root, data, word):
    """F49."""
    write_run(root, "small", 0)
    write_run(root, "small-slw", 0, more=SLW, data=data)
    with pytest.raises(UsageError, match=word) as refusal:
        of("small", "small-slw")
    assert refusal.value.exit_code == 2 and "--allow" in str(refusal.value)
    shown = of("small", "small-slw", allow=True)
    assert any(label.kind == "allowed" and word in label.text for label in shown.labels)
    # Shown is not judged.
    assert {d.text for d in shown.verdicts} <= {
        "not judged: these losses are not comparable",
        "none",
    }


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (
            {"origin": {"device": "Other"}},
            "different device: Some CPU in small-seed0; Other in small-slw-seed0",
        ),
        ({"origin": {"torch": "2.11"}}, "different torch version"),
        (
            {"origin": {"threads": 8}},
            "different number of threads: 2 in small-seed0; 8 in small-slw",
        ),
        ({"origin": {"git_commit": "ffff"}}, "different efftrain commit"),
        ({"origin": {"dtype": "bf16"}}, "different compute type"),
        (
            {"data": {"train_hash": "d" * 64}},
            "different training text: aaaaaaaaaaaa in small-seed0; dddddddddddd in small-slw-seed0",
        ),
        (
            {"origin": {"python": "3.12.1"}},
            "different Python version: 3.11.7 in small-seed0; 3.12.1",
        ),
        ({"budget": 102399}, "different train.tokens: small 102400, small-slw 102399"),
    ],
)
def test_other_differences_are_said(root, options, word):
    """F49."""
    write_run(root, "small", 0)
    write_run(root, "small-slw", 0, more=SLW, **options)  # type: ignore[arg-type]
    assert any(
        label.kind == "warning" and word in label.text for label in of("small", "small-slw").labels
    )


@pytest.mark.parametrize("counted", [True, False])
def test_flops_without_muons_iterations_are_not_judged(root, counted):
    """A run that was resumed after the change lacks those of its first steps."""
    for seed in range(3):
        write_run(root, "small", seed)
        rows = rows_of(100, seed, speed=1.3)
        if not counted:
            for row in rows[:50]:
                row.pop("optimizer_flops", None)
        path = write_run(root, "small-muon", seed, rows=rows)
        recipe = (path / "recipe.toml").read_text()
        muon = '[optim]\nname = "muon"\nmuon_lr = 0.02'
        (path / "recipe.toml").write_text(recipe.replace("[optim]", muon))
    flops = verdict_of("flops_to_match", "small-muon")
    tokens = verdict_of("tokens_to_match", "small-muon")
    assert tokens.why is None and tokens.p_holm is not None
    why = (
        "not judged: small-muon-seed0, small-muon-seed1, small-muon-seed2: begun before the FLOPs"
        " of Muon's Newton-Schulz iterations were counted"
    )
    assert (flops.why and flops.why.text) == (None if counted else why)
    assert (flops.p_holm is not None) == counted


def test_names_globs_recipes_and_paths(root):
    write_pair(root)
    write_run(root, "other", 0, name="small-slw", more=SLW, lr=2e-3)
    names = lambda *given: [path.name for path in select_runs(given)]  # noqa: E731
    assert names("small") == ["small-seed0", "small-seed1", "small-seed2"]
    assert names("small-slw") == ["small-slw"]  # a run wins over a recipe of its name
    assert names("small-slw-*") == ["small-slw-seed0", "small-slw-seed1", "small-slw-seed2"]
    assert names("small-seed1", "small") == ["small-seed1", "small-seed0", "small-seed2"]
    assert names(str(root / "small-seed0")) == ["small-seed0"]
    with pytest.raises(UsageError, match=r"'smal' \(did you mean small or small-slw"):
        select_runs(["smal"])
    with pytest.raises(UsageError, match="nothing-\\*"):
        select_runs(["nothing-*"])


def test_an_imported_run_is_not_of_the_recipe_that_continues_it(root):
    write_run(root, "small", 0)
    write_run(root, "small", 1234, name="gpt2", origin={"imported": {"directory": "hf"}})
    assert [path.name for path in select_runs(["small"])] == ["small-seed0"]


def test_seeds_are_ordered_as_numbers(root):
    for seed in (10, 9, 2):
        write_run(root, "small", seed)
    assert [path.name for path in select_runs(["small"])] == [
        "small-seed2",
        "small-seed9",
        "small-seed10",
    ]


def test_copies_of_a_run_are_refused(root):
    write_run(root, "small", 0)
    write_run(root, "small", 0, name="small-seed0-2", origin={"started": "2026-02-02"})
    write_run(root, "small-slw", 0, more=SLW)
    with pytest.raises(UsageError) as raised:
        of("small", "small-slw")
    assert str(raised.value).splitlines() == [
        "small-seed0, small-seed0-2 have the same recipe and seed: not independent samples",
        "  name one of each seed: efftrain compare small-seed0-2 small-slw-seed0",
        "  or pass --allow for the newest",
    ]
    assert [run.name for run in of("small", allow=True).runs] == ["small-seed0-2"]


def test_unknown_baseline_is_refused(root):
    write_pair(root, 1)
    with pytest.raises(UsageError, match="'small', 'small-slw'"):
        of("small", "small-slw", baseline="tiny")
    for name in ("small-slw-seed0", "*-slw-*"):
        assert of("small", "small-slw", baseline=name).baseline.label == "small-slw"


@pytest.mark.parametrize("section", ["[parallel]\ncheck_every = 2", '[wandb]\nmode = "off"'])
def test_sections_that_are_no_method_keep_the_default_baseline(root, section):
    """A recipe with [parallel] was never the plain one, so the first named was."""
    write_run(root, "small-slw", 0, more=SLW)
    write_run(root, "small", 0, more=f"\n{section}\n")
    write_run(root, "small-pld", 0, more=PLD)
    assert of("small-slw", "small", "small-pld").baseline.label == "small"


def test_groups_of_one_recipe_name_are_told_apart_by_their_keys(root):
    write_run(root, "small", 0)
    write_run(root, "small", 0, name="small-fast", lr=3e-3)
    assert {group.label for group in of("small").groups} == {
        "small optim.lr=0.003",
        "small optim.lr=0.001",
    }


def test_settings_that_are_written_alike_have_two_labels(root):
    """Six digits do not tell these two rates apart, so the groups have the names of their first
    runs."""
    for seed in (0, 1):
        write_run(root, "small", seed, lr=1e-3)
        write_run(root, "small", seed, name=f"small-other-{seed}", lr=1.0000001e-3)
    labels = {group.label for group in of("small", every_setting=True).groups}
    assert labels == {"small-seed0", "small-other-0"}


def test_groups_have_short_names(root):
    """Runs that --name named are shown by it; of seven settings that differ three are in a name."""
    many = f"{SLW}multiple = 4\nmode = 'reshape'\nbatch = 'tokens'\n"
    for seed in (0, 1):
        write_run(root, "small", seed, name=f"first-{seed}")
        write_run(root, "small", seed, name=f"second-{seed}", lr=3e-3, more=many)
    assert [group.label for group in of("first-0", "second-0").groups] == ["first-0", "second-0"]
    assert [row[1] for row in key_table(of("first-0", "second-0")).rows] == ["first-0", "second-0"]
    plain, named = of("first-?", "second-?", every_setting=True).groups
    settings = "optim.lr=0.003 seq_len_warmup.start=8 seq_len_warmup.steps=10"
    assert named.label == f"small {settings} and 3 more"
    assert plain.label == "small optim.lr=0.001"


def test_names_have_as_many_settings_as_tell_groups_apart(root):
    for seed in (0, 1):
        for windows in (4, 5):
            more = f"{SLW}multiple = 4\n[eval]\nwindows = {windows}\n"
            write_run(root, "small", seed, name=f"w{windows}-{seed}", lr=3e-3, more=more)
        write_run(root, "small", seed, name=f"plain-{seed}")
    labels = {group.label for group in of("w?-*", "plain-*", every_setting=True).groups}
    assert len(labels) == 3 and all(len(label) < 150 for label in labels)


def test_a_run_of_an_older_version_is_of_the_same_recipe(root):
    """Its recipe.toml lacks keys that came later, and computed what their defaults say."""
    write_run(root, "small", 0)
    for seed, norm in ((1, "layernorm"), (2, "none")):
        path = write_run(root, "small", seed) / "recipe.toml"
        path.write_text(
            path.read_text().replace("seq_len = 128", f'seq_len = 128\nnorm = "{norm}"')
        )
    groups = {group.label: group.seeds for group in of("small").groups}
    assert groups == {"small model.norm=layernorm": (0, 1), "small model.norm=none": (2,)}


def budgets(root: Path, flops: float = 1.0) -> None:
    """B trains twice A's tokens, at `flops` of A's FLOPs a token."""
    for seed in range(3):
        write_run(root, "small", seed, steps=50)
        rows = [
            row | {"total_flops": flops * row["total_flops"]} for row in rows_of(100, seed, 1.3)
        ]
        write_run(root, "long", seed, rows=rows, steps=100, more=SLW)


@pytest.mark.parametrize(
    ("flops", "equal", "text"),
    [
        (1.0, None, "not judged: long spent 2.00x the tokens of small; --equal flops judges"),
        (0.5, None, "better"),
        (0.5, "flops", "better"),
        (0.5, "tokens", "not judged: long spent 2.00x the tokens of small"),
        (0.7, "flops", "not judged: long spent 1.40x the FLOPs of small"),
        # Rows without FLOPs say nothing of what the runs have in common.
        (0.0, None, "not judged: long spent 2.00x the tokens of small; --equal flops judges"),
        (0.0, "flops", "not judged: the FLOPs of a run are unknown"),
    ],
)
def test_final_losses_are_judged_at_equal_budgets(root, flops, equal, text):
    budgets(root, flops)
    found = verdict_of("final_loss", "long", equal=equal)
    assert found.text.startswith(text)
    assert found.note == ("at equal FLOPs, and 2.00x the tokens" if text == "better" else "")


def test_a_longer_run_is_no_better_setting(root):
    """Both budgets of a recipe are compared, at the baseline's largest; only its own is judged."""
    for seed in range(3):
        for recipe, more in (("small", ""), ("small-slw", SLW)):
            for steps in (50, 100):
                write_run(
                    root, recipe, seed, steps=steps, more=more, name=f"{recipe}-{steps}-{seed}"
                )
    compared = of("small", "small-slw", baseline="small")
    assert compared.baseline.budget == 102400 and not compared.trials
    texts = {
        group.budget: compared.verdict("final_loss", group.label).text
        for group in compared.groups[1:]
    }
    assert texts[51200].startswith("not judged: small-slw") and "0.50x the tokens" in texts[51200]
    assert not texts[102400].startswith("not judged")


@pytest.mark.parametrize("shared", [4, 101])
def test_one_run_under_two_seeds_is_refused(root, shared):
    """4 rows: the second run is the first, continued under another seed after step 3."""
    rows = rows_of(100, seed=0)
    write_run(root, "small", 0, rows=rows)
    write_run(root, "small", 1, rows=rows[:shared] + rows_of(100, seed=1)[shared:])
    with pytest.raises(UsageError) as refused:
        of("small")
    assert "  - small-seed0 and small-seed1 are one run under two seeds" in str(refused.value)
    assert "\n  leave out one side of each line, or pass --allow" in str(refused.value)


def test_seeds_grown_from_one_run_may_share_its_losses(root):
    grown = {"grown_from": {"run": "parent", "checkpoint": "step-00000050"}}
    for seed in (0, 1):
        rows = rows_of(100, seed=0)[:51] + rows_of(100, seed=seed)[51:]
        write_run(root, "small", seed, rows=rows, origin=grown)
    labels = [label.text for label in of("small").labels]
    assert any("began with the weights of parent" in text for text in labels)


def test_what_else_a_method_changed_stands_below_the_verdict(root):
    """B trains the same 102,400 tokens in 200 steps of 512; both peak at step 10, B at twice the
    rate."""
    for seed in range(3):
        write_run(root, "small", seed)
        rows = [
            row | {name: row[name] / 2 for name in ("tokens", "total_flops")}
            for row in rows_of(200, seed, 1.3)
        ]
        rows = [row | {"lr": 2 * row["lr"]} if "lr" in row else row for row in rows]
        write_run(root, "small-slw", seed, rows=rows, budget=102400, more=SLW)
    lines = verdict_sentences(of("small", "small-slw"))
    assert (
        lines[2]
        == "small-slw made 200 instead of 100 updates, warmed up over 5,120 instead of 10.2K tokens"
        " and peaked at a rate of 0.002 instead of 0.001."
    )
    assert len(verdict_sentences(of("small"))) == 0


def changed(step: float, tokens: float, warmup: float = 100.0, rate: float = 1e-3) -> Any:
    run = SimpleNamespace(status="finished", step=step, tokens=tokens)
    run.warmup_tokens = warmup
    run.peak_lr = rate
    return SimpleNamespace(label="B", runs=[run])


@pytest.mark.parametrize(
    ("method", "text"),
    [
        # 2 % more are not named.
        (changed(102, 102_000, 102.0, 1.02e-3), ""),
        (changed(103, 103_000), "B made 103 instead of 100 updates"),
        (changed(200, 100_000), "B made 200 instead of 100 updates"),
        (
            changed(200, 400_000),
            "B made 200 instead of 100 updates and took 2,000 instead of 1,000 tokens per update",
        ),
        (changed(100, 100_000, 50.0), "B warmed up over 50 instead of 100 tokens"),
        (changed(100, 100_000, rate=2e-3), "B peaked at a rate of 0.002 instead of 0.001"),
    ],
)
def test_what_else_a_method_changed_by_hand(method, text):
    """The baseline made 100 updates of 1,000 tokens."""
    assert describe_differences(changed(100, 100_000), method) == text


@pytest.mark.parametrize("key", ["grown_from", "imported"])
def test_seeds_that_share_their_first_weights_are_named(root, key):
    """Three runs of one parent are not three samples of what a recipe does."""
    write_pair(root)
    for seed in range(3):
        for name, parent in (("apart", f"small-seed{seed}"), ("alike", "small-seed0")):
            origin = {key: {"run": parent}}
            write_run(root, name, seed, name=f"{name}-seed{seed}", speed=1.2, origin=origin)
    (found,) = [label for label in of("small", "apart", "alike").labels if "weights" in label.text]
    assert found.kind == "warning"
    assert found.text == (
        "alike-seed0, alike-seed1, alike-seed2 began with the weights of small-seed0: intervals and"
        " p hold for these weights only"
    )
