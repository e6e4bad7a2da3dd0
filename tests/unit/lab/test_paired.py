"""The paired experiment: what it trains, keeps and says; one clear error for bad input."""

import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fissile
from fissile.lab.paired_results import Experiment

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


def make(seed, kind=torch.optim.Adam, **options):
    model = fissile.MLP([6, 4, 2])
    return model, kind(model.parameters(), lr=0.05, **options)


def fit(model, optimizer):
    for rows in torch.randperm(len(X)).split(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()


def score(model):
    return -nn.functional.cross_entropy(model(X), Y)


SHORT = {"trials": 3, "warm_up": 2, "fine_tune": 2}


def run(make=make, fit=fit, score=score, **options):
    return fissile.experiment(make, fit, score, **{**SHORT, "arms": (2,), **options})


@pytest.fixture(scope="module")
def found():
    return run(arms=(2, 3))


# --- what is trained


def test_shapes_names_and_non_zeros(found):
    assert list(found.scores) == ["dense", "random-2", "random-3"]
    assert np.array(found.warm).shape == (3, 2)
    assert all(found.curve(arm).shape == (3, 3) for arm in found.scores)
    assert {*found.nonzeros.values()} == {(6 * 4 + 4 * 2,) * 3}


def test_arms_go_on_from_where_the_warm_up_ended(found):
    warm = np.array(found.warm)[:, -1]
    assert found.curve("dense")[:, 0].tolist() == warm.tolist()
    assert (found.curve("random-2")[:, 0] != warm).all()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"betas": (0.8, 0.99)}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
    ],
)
def test_the_dense_arm_is_a_loop_that_never_stopped(kind, options):
    kept = []

    def scored(model):
        kept.append([p.detach().clone() for p in model.parameters()])
        return 1.0

    seeds = []

    def seeded(model, optimizer):
        seeds.append(torch.initial_seed())
        fit(model, optimizer)

    run(lambda seed: make(seed, kind, **options), seeded, scored, trials=1)
    assert seeds[2:4] == seeds[4:6]  # the same batches in every arm
    assert len({*seeds}) == 4
    torch.manual_seed(seeds[0])
    model, optimizer = make(0, kind, **options)
    model.load_state_dict(dict(zip(model.state_dict(), _first_weights(kind, options), strict=True)))
    for seed in seeds[:4]:
        torch.manual_seed(seed)
        fit(model, optimizer)
    assert all(map(torch.equal, model.parameters(), kept[4]))


def _first_weights(kind, options):
    """The weights that an experiment's first make gives."""
    held = []

    def stop(model, optimizer):
        held.extend(p.detach().clone() for p in model.parameters())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(lambda seed: make(seed, kind, **options), stop)
    return held


def test_what_a_schedule_did_to_the_rate_is_carried():
    rates = []

    def slower(model, optimizer):
        rates.append(optimizer.param_groups[0]["lr"])
        fit(model, optimizer)
        optimizer.param_groups[0]["lr"] /= 2

    run(fit=slower, trials=1)
    assert rates == [0.05, 0.025, 0.0125, 0.00625, 0.0125, 0.00625]


def test_models_come_in_the_mode_that_each_function_needs():
    def trained(model, optimizer):
        assert model.training
        fit(model, optimizer)

    def scored(model):
        assert not model.training
        return 0.5

    run(fit=trained, score=scored, trials=1)


def test_random_numbers_are_given_back_and_results_are_the_same_again(found):
    before = torch.get_rng_state()
    again = run(arms=(2, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert again == found


def test_arms_by_name_take_the_options_of_expand():
    arms = {"gram": {"alpha": 2, "split": "gram"}, "own": {"alpha": 2, "split": fissile.Blocks(3)}}
    arms |= {"all": {"alpha": 2, "budget": "all", "allocation": "layer"}}
    found = run(arms=arms, trials=1)
    assert list(found.scores) == ["dense", *arms]


# --- what is kept


def counted(calls, stop=None):
    def fitted(model, optimizer):
        if len(calls) == stop:
            raise KeyboardInterrupt
        calls.append(None)
        fit(model, optimizer)

    return fitted


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 8, 17])
def test_after_ctrl_c_the_same_call_goes_on(stop, found, tmp_path):
    calls = []
    with pytest.raises(KeyboardInterrupt) as caught:
        run(fit=counted(calls, stop), arms=(2, 3), store=tmp_path / "store")
    assert "the same call goes on" in caught.value.__notes__[0]
    rest = []
    assert run(fit=counted(rest), arms=(2, 3), store=tmp_path / "store") == found
    whole = 3 * (2 + 3 * 2)
    assert whole <= len(calls) + len(rest) < whole + 2  # less than a warm-up or an arm is lost
    nothing = []
    assert run(fit=counted(nothing), arms=(2, 3), store=tmp_path / "store") == found
    assert not nothing


def test_more_trials_and_arms_do_only_what_is_missing(found, tmp_path):
    run(store=tmp_path, trials=2)
    calls = []
    assert run(fit=counted(calls), arms=(2, 3), store=tmp_path) == found
    assert len(calls) == 2 * 2 + (2 + 3 * 2)


def test_what_is_finished_survives_a_kill(found, tmp_path):
    code = f"""
    import os, sys
    sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
    import test_paired as t
    calls = []
    def fitted(model, optimizer):
        calls.append(None)
        if len(calls) == 8:
            os._exit(9)
        t.fit(model, optimizer)
    t.run(fit=fitted, arms=(2, 3), store={str(tmp_path)!r})
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert killed.returncode == 9
    calls = []
    assert run(fit=counted(calls), arms=(2, 3), store=tmp_path) == found
    assert len(calls) == 3 * 8 - 6


def test_a_store_of_another_experiment_is_refused(tmp_path):
    run(store=tmp_path, trials=1)
    for message, change in {
        "its rounds differs": {"fine_tune": 3},
        "what make returns differs": {"make": lambda seed: make(seed, weight_decay=0.1)},
        "has an arm 'random-2' of other options": {"arms": {"random-2": {"alpha": 3}}},
    }.items():
        with pytest.raises(fissile.FissileError, match=message):
            run(store=tmp_path, **{"trials": 1, **change})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"options": {"alpha": 2}, "scores": ["a"]}'])
def test_a_damaged_file_is_named(text, tmp_path):
    run(store=tmp_path, trials=1)
    file = tmp_path / "trial-0" / "random-2.json"
    file.write_text(text)
    with pytest.raises(fissile.FissileError, match=r"random-2\.json"):
        run(store=tmp_path, trials=1)
    file.unlink()
    run(store=tmp_path, trials=1)


def test_a_torn_state_is_one_error(tmp_path):
    run(store=tmp_path, trials=1)
    state = tmp_path / "trial-0" / "warm-up.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(fissile.FissileError, match=r"warm-up\.safetensors: not a readable"):
        run(store=tmp_path, trials=1, arms=(2, 3))


# --- what is said


def planted(*differences, unit=0.01):
    rows = len(differences)
    dense = tuple((0.5, 0.6) for _ in range(rows))
    split = tuple((0.45, 0.6 + unit * d) for d in differences)
    warm, counts = ((0.5,),) * rows, (264,) * rows
    return Experiment(warm, {"dense": dense, "split": split}, {"dense": counts, "split": counts})


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [
        ((2.0, 2.2, 1.8), "split: gain from splitting: +2.0 points, 95 % 1.5 to 2.5."),
        ((-2.0, -2.2, -1.8), "split: splitting costs: −2.0 points, 95 % −2.5 to −1.5."),
        ((-0.3, -0.9, 0.3), "split: no gain from splitting: −0.3 points, 95 % −1.8 to 1.2."),
        ((0.3, 0.9, -0.3), "split: no clear gain: +0.3 points, 95 % −1.2 to 1.8."),
        ((0.0, 0.0, 0.0), "split: no gain from splitting: +0.0 points, 95 % 0.0 to 0.0."),
        ((1.0, 2.0), "split: too few trials to tell (2 of at least 3): +1.5 points, 95 % −4.9 to 7.9."),  # noqa: E501
        ((1.0,), "split: too few trials to tell (1 of at least 3): +1.0 points."),
    ],
)  # fmt: skip
def test_a_plain_sentence(differences, sentence):
    found = planted(*differences)
    assert found.verdicts[0].sentence == sentence
    assert sentence in str(found)


def test_numbers_of_the_verdict_are_those_of_a_paired_t_test():
    from scipy import stats

    found = run(trials=4)
    [verdict] = found.verdicts
    dense, split = (found.curve(arm)[:, -1] for arm in ("dense", "random-2"))
    test = stats.ttest_rel(split, dense)
    assert verdict.p == pytest.approx(test.pvalue)
    interval = test.confidence_interval()
    assert (verdict.low, verdict.high) == pytest.approx((interval.low, interval.high))
    assert verdict.difference == pytest.approx((split - dense).mean())
    assert "points" not in str(found)


def test_drop_and_recovery():
    [verdict] = planted(1, 2, 3).verdicts
    assert verdict.drop == pytest.approx(5)
    assert verdict.recovery == 1
    [verdict] = planted(-20, -21, -22).verdicts
    assert verdict.recovery is None
    assert "never" in str(planted(-20, -21, -22))


def test_many_arms_are_corrected_for():
    one = planted(1.0, 2.0, 1.4)
    split = one.scores["split"]
    two = Experiment(
        one.warm, {**one.scores, "same": split}, {**one.nonzeros, "same": one.nonzeros["split"]}
    )
    assert two.verdicts[0].p == pytest.approx(2 * one.verdicts[0].p)
    assert two.verdicts[0].low < one.verdicts[0].low


def test_other_forms(found, tmp_path):
    assert repr(found) == "Experiment(arms: dense, random-2, random-3; trials: 3)"
    assert "<td>random-3</td>" in found._repr_html_()
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["verdicts"][0]["arm"] == "random-2"
    assert json.loads(json.dumps(planted(1.0).to_dict()))["verdicts"][0]["low"] is None
    figure = found.plot()
    assert len(figure.axes[0].lines) == 5
    figure.savefig(tmp_path / "found.png")
    planted(1.0).plot()


# --- bad input


def replaced(model, optimizer):
    fit(model, optimizer)
    model.layers[0] = nn.Linear(6, 5)


def lost(model, optimizer):
    fit(model, optimizer)
    model.layers[0] = nn.Linear(6, 4)


def idle(model, optimizer):
    pass


def uneven(model, optimizer):
    for _ in range(
        1 + (model.layers[0].weight.shape != (4, 6) or hasattr(model.layers[0], "alpha"))
    ):
        fit(model, optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"make": lambda seed: fissile.MLP([6, 4, 2])},
            r"make returned MLP; let it return \(model",
        ),
        ({"make": lambda seed: None}, "make returned NoneType"),
        ({"make": lambda seed: (1, 2)}, "make returned int and int"),
        ({"make": lambda seed: (make(0)[0], make(1)[1])}, "holds none of this model's parameters"),
        (
            {"make": lambda seed: make(seed, torch.optim.Adagrad)},
            "cannot carry the state of Adagrad",
        ),
        (
            {"fit": replaced},
            "fit changed the architecture in the warm-up of trial 0: the parameter",
        ),
        ({"fit": lost}, "'layers.0.weight' is not the one that it was given"),
        ({"fit": idle}, "fit made no step with its optimizer in the warm-up of trial 0"),
        ({"fit": uneven}, "fit made 12 steps in the arm 'random-2' of trial 0, and 6 in 'dense'"),
        ({"score": lambda model: math.nan}, "score returned nan in the warm-up of trial 0"),
        ({"score": lambda model: None}, "score returned None"),
        ({"score": lambda model: "0.9"}, "score returned '0.9'"),
        ({"score": lambda model: X}, r"score returned tensor\("),
        ({"arms": ()}, r"arms=\(\) are no arms"),
        ({"arms": "random"}, "arms='random' are no arms"),
        ({"arms": (2, 1)}, "the arm 'random-1' has alpha=1, which splits nothing; give 2 or more"),
        ({"arms": (2.5,)}, "alpha=2.5 is not a whole number"),
        ({"arms": {"a": {"split": "gram"}}}, "are no arms"),
        ({"arms": {"dense": {"alpha": 2}}}, "the arm 'dense' sets what the experiment sets"),
        ({"arms": {"a": {"alpha": 2, "seed": 1}}}, "the arm 'a' sets"),
        ({"arms": (0,)}, "alpha"),
        ({"trials": 0}, "trials=0"),
        ({"warm_up": 0}, "warm_up=0"),
        ({"fine_tune": 1.5}, "fine_tune=1.5"),
    ],
)
def test_bad_input_is_one_clear_error(options, message):
    with pytest.raises(fissile.FissileError, match=message):
        run(**options)


def test_nothing_is_lost_when_a_score_is_no_number(found, tmp_path):
    scored = []

    def failing(model):
        scored.append(None)
        return math.nan if len(scored) == 14 else score(model)

    with pytest.raises(
        fissile.FissileError, match="score returned nan in the arm 'dense' of trial 1"
    ):
        run(score=failing, arms=(2, 3), store=tmp_path)
    calls = []
    assert run(fit=counted(calls), arms=(2, 3), store=tmp_path) == found
    assert len(calls) == 2 * 3 * 2 + 2


def test_an_error_of_the_user_s_own_passes_with_a_note():
    def broken(model, optimizer):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        run(fit=broken)
    assert caught.value.__notes__[0].startswith("This was in the warm-up of trial 0")


def test_a_make_that_changes_its_mind_is_refused():
    widths = iter([4, 4, 5, 5, 5])

    def moody(seed):
        model = fissile.MLP([6, next(widths), 2])
        return model, torch.optim.Adam(model.parameters())

    with pytest.raises(fissile.FissileError, match=r"make\(0\) does not always return the same"):
        run(make=moody, trials=1)


def test_importing_fissile_does_not_import_the_lab():
    code = "import sys, fissile; assert not any(n.startswith('fissile.lab') for n in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "experiment" in fissile.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fissile.nothing  # noqa: B018


@pytest.mark.parametrize("shift", np.linspace(0.2, 1.6, 15))
def test_sentence_and_interval_agree(shift):
    one = planted(shift - 0.5, shift, shift + 0.6, shift + 0.1)
    split, count = one.scores["split"], one.nonzeros["split"]
    two = Experiment(one.warm, {**one.scores, "b": split}, {**one.nonzeros, "b": count})
    for found in (one, two):
        assert ("gain from splitting" in found.verdicts[0].sentence) == (found.verdicts[0].low > 0)


def test_a_config_that_all_networks_share_stays_as_it_is():
    pytest.importorskip("transformers")
    from language_models import bert, ids

    rows = ids(20)
    config = bert(num_hidden_layers=1).config

    def made(seed):
        model = type(bert())(config)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model, adam):
        adam.zero_grad()
        model(rows, labels=rows[:, 0] % 2).loss.backward()
        adam.step()

    found = run(made, step, lambda model: -float(model(rows, labels=rows[:, 0] % 2).loss))
    assert config.intermediate_size == 24
    assert len({*found.nonzeros["dense"], *found.nonzeros["random-2"]}) == 1
