import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKERS = Path(__file__).parent / "workers"
WEIGHTS = 12 * 10 + 10 * 7 + 7 * 3
ROUNDING = 1e-6


def two_ranks(script, folder):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*torchrun, str(WORKERS / script), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks("parallel.py", tmp_path_factory.mktemp("plain"))


def test_ddp_around_an_expanded_model(ranks):
    for rank in ranks:
        found = rank["ddp_expanded_before"]
        assert found["owners_same"]
        assert found["parameters_same"]
        assert found["apart"] < ROUNDING < found["moved"]
        assert found["nonzeros"] == found["really"] == WEIGHTS


@pytest.mark.parametrize("check", ["ddp_expanded_in_the_middle", "ddp_expanded_in_place"])
def test_ddp_unwrapped_expanded_and_wrapped_again(ranks, check):
    for rank in ranks:
        found = rank[check]
        assert found["owners_same"]
        assert found["parameters_same"]
        assert found["apart"] < ROUNDING
        assert found["nonzeros"] == WEIGHTS


@pytest.mark.parametrize("check", ["ddp_expanded_after", "fsdp_expanded_after"])
def test_a_wrapped_model_is_not_expanded(ranks, check):
    for rank in ranks:
        assert "expand before wrapping" in rank[check]


@pytest.mark.parametrize("difference", ["weights", "seed", "alpha", "one_expanded"])
def test_every_rank_hears_of_a_difference(ranks, difference):
    for rank in ranks:
        assert "of rank 1 is not that of rank 0" in rank["ranks_that_differ"][difference]


def test_equal_ranks_pass(ranks):
    assert [rank["ranks_that_differ"]["none"] for rank in ranks] == [None, None]


def test_fully_shard_around_an_expanded_model(ranks):
    for rank in ranks:
        found = rank["fsdp_expanded_before"]
        assert found["apart"] < ROUNDING
        assert found["loaded"] < ROUNDING
        assert found["nonzeros"] == found["nonzeros_alone"]
        assert sum(found["nonzeros"]) == WEIGHTS - 12 * 10
    first, second = (rank["fsdp_expanded_before"]["sharded"] for rank in ranks)
    # Seven parents on two ranks: each holds a part of the rows and no more.
    assert [first[1], second[1]] == [[4, 10], [3, 10]]


def test_lightning_expands_under_ddp(tmp_path):
    for found in two_ranks("lightning_ddp.py", tmp_path):
        # Two of them, because the one around the dense module was replaced.
        assert found["wrappers"] == ["DistributedDataParallel"] * 2
        assert found["parameters_same"]
        assert found["owners_same"]
        assert found["nonzeros"] == WEIGHTS
        assert found["apart"] < ROUNDING
        assert found["resumed_0"] == found["resumed_1"] == 0
