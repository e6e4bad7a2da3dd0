"""What the documentation says of Ray against local runs is what was measured."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "benchmarks/results/cluster-check-h200.json").read_text("utf-8"))


def test_the_page_has_the_numbers_of_the_check():
    page = " ".join((ROOT / "docs" / "cluster.md").read_text("utf-8").split())
    steps, again = FOUND["steps"], FOUND["again"]
    local, ray, mixed = steps["local"], steps["ray"], steps["mixed"]
    gpu, cpu = mixed["by"].values()
    for said in (
        f"Checked on an {FOUND['machine']}",
        f"{local['trials']} trials of four studies took {local['seconds']} s in a local run",
        f"and {ray['seconds']} s on Ray",
        f"was killed, with {steps['killed']['stored_at_kill']} trials stored",
        f"{gpu} trials were trained on the GPU and {cpu} on processors",
        f"all {again['ray']['trials']} were equal, on Ray and with a worker killed at "
        f"{again['killed']['stored_at_kill']}",
    ):
        assert said in page


def test_nothing_differed_but_between_devices():
    steps = FOUND["steps"]
    for name, one in steps.items():
        assert one["good"]
        assert one["same_keys"]
        assert one["trials"] == sum(one["by"].values()) == steps["local"]["trials"]
        assert name == "mixed" or one["differing_trials"] == 0
    assert steps["killed"]["killed_had_opened_a_gpu"]
    for name in ("local", "ray", "killed"):
        assert FOUND["again"][name]["differing_trials"] == 0
