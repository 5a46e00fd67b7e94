"""`elastic-train plan` as it is typed: JSON, tables, a page, and what is wrong said before a model is built."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from elastic_train.cli.main import main
from elastic_train.config.sources import load_config
from elastic_train.data.loading.lane_batch import LaneBatch
from elastic_train.errors import ConfigError
from elastic_train.planning import calibrating
from elastic_train.planning.arithmetic.catalogue import parse_cluster
from elastic_train.planning.calibrating import Calibrated, lane_seconds, measure_device
from elastic_train.planning.reading import read_config
from tests.conftest import PATIENCE_S, begin, places_of
from tests.elastic_train.planning.test_reading import written


def typed(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    return int(ended.value.code or 0)


@pytest.mark.heavy
def test_a_plan_as_json(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = written(rows, tmp_path)
    assert typed(str(config), "--on", "4xH100", "--price", "2", "--by", "memory", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["on"] == "1x4xH100" and found["model"]["blocks"] == 2
    memory = [one["memory"] for one in found["best"]]
    assert len(memory) == 5 and memory == sorted(memory)
    assert found["own"]["cost"] == pytest.approx(found["own"]["days"] * 24 * 2 * 4)
    assert [row["devices"] for row in found["scaling"]["strong"]] == [1, 2, 4]


@pytest.mark.heavy
def test_json_has_what_is_out_of_the_question_beside_what_the_trainer_refuses(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(str(written(rows, tmp_path)), "--on", "16xCPU", "--parallel.pipeline", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"layout": "shards none, pp 2", "why": found["own"]["problems"][0]} in found["refused"]
    assert any("parallel.pipeline: 2" in why for why in found["trainer_refuses"])


@pytest.mark.heavy
def test_a_plan_as_tables(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(str(written(rows, tmp_path)), "--on", "8xCPU", "--parallel.shards", "optimizer") == 0
    shown = capsys.readouterr().out
    assert "It cannot be used: 8 replicas, but only 4 lanes" in shown
    assert "No layout can be used" in shown
    assert shown.count("8 replicas, but only 4 lanes") == 2, "each reason once, and that of this configuration"
    assert "layouts: 8 replicas" in shown
    assert "A step takes" not in shown and "The run takes" not in shown, "of what cannot be used"


@pytest.mark.heavy
def test_a_layout_to_copy_is_whole_on_a_narrow_terminal(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is any other cell of the tables cut; and the row length has its source."""
    monkeypatch.setenv("COLUMNS", "80")
    assert typed(str(written(rows, tmp_path)), "--on", "4x1xH100", "--parallel.pipeline", "2", "--cells") == 0
    shown = capsys.readouterr().out
    best = shown[shown.index("The best by throughput:") :].splitlines()[1:6]
    assert [line.split()[0] for line in best] == ["1", "2", "3", "4", "5"]
    assert all("shards " in line for line in best) and max(map(len, best)) > 20
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert "tokens with padding: the mean of the first step's first 4 lanes" in shown.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "8xH10"), "did you mean 'H100'"),
        (("--spares", "-1", "--mtbf-h", "-1"), "--mtbf-h must be more than 0"),
        (("--mtbf-h", "inf"), "--mtbf-h must be more than 0, and a number of hours, not inf"),
        (("--price", "nan"), "--price must be at least 0, not nan"),
        (("--on", "nowhere.yaml"), "cannot be read"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_built(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(str(tmp_path / "no.yaml"), *words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster: {device: H100, between: 100}", "no link '100'"),
        ("cluster: {device: H100, inside: null}", "no link 'None'"),
        ("cluster: {device: H100, nodes: true}", "are whole numbers"),
        ("cluster: {device: H100}\nlinks: [IB]", "links is not a mapping of names"),
        ("cluster: {device: H100}\nlinks: {IB: {gb_per_s: 0, alpha_s: 0}}", "IB.gb_per_s must be a number more than 0"),
        ("cluster: {device: H100}\nlinks: {IB: {gb_per_s: true, alpha_s: 0}}", "IB.gb_per_s must be a number more"),
        ("cluster: {device: D}\ndevices: {D: {link: 7}}", "D.link must be the name of a link, not 7"),
    ],
)
def test_what_a_file_of_devices_has_wrong_is_said(text: str, said: str, tmp_path: Path) -> None:
    """By its own name, as of a value that is missing, and before anything is divided by it."""
    (tmp_path / "here.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_cluster(str(tmp_path / "here.yaml"))


def test_a_calibrated_machine_is_a_cluster(tmp_path: Path) -> None:
    device = measure_device(1)
    assert device.tflops_fp32 > 0 and device.memory_gb_per_s > 0 and 0 < device.call_s < 1
    path = tmp_path / "here.yaml"
    path.write_text(Calibrated(device, parse_cluster("CPU").inside).as_yaml())
    found = parse_cluster(str(path))
    assert (found.device, found.inside) == (device, parse_cluster("CPU").inside)


@pytest.mark.heavy
def test_a_core_is_measured_with_one_thread_and_a_model_with_those_of_its_ranks(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number torch has chosen, which is that of all cores where OMP_NUM_THREADS does not say another."""
    used, before = dict[str, int](), torch.get_num_threads()

    def timed(name: str) -> object:
        return lambda *_, **__: float(used.setdefault(name, torch.get_num_threads()))

    monkeypatch.setattr(calibrating, "_shortest", timed("core"))
    monkeypatch.setattr(calibrating, "run_once", timed("model"))
    read = read_config(load_config(written(rows, tmp_path, threads_per_rank=2)))
    try:
        torch.set_num_threads(3)
        measure_device(1)
        lane_seconds(read, 1)
    finally:
        torch.set_num_threads(before)
    assert used == {"core": 1, "model": 2}


@pytest.mark.heavy
def test_lanes_without_samples_take_no_part_in_a_models_time(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a set with fewer rows than a step has lanes; they would take no time, and halve the median."""
    read = read_config(load_config(written(rows, tmp_path, batch={"global_batch": 2048, "micro_batch": 4})))
    timed = list[LaneBatch]()
    monkeypatch.setattr(calibrating, "run_once", lambda plan, model, batch, step: timed.append(batch))
    lane_seconds(read, 1)
    assert timed and all(batch.tensors for batch in timed)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [pytest.param(None, marks=pytest.mark.hunt), 2])  # both import all for themselves
def test_what_calibrate_writes_is_what_a_plan_reckons_with(
    num_ranks: int | None, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone it measures between two processes of its own, as a rank between ranks 0 and 1; the first rank says it."""
    config, out, log = written(rows, tmp_path), tmp_path / "here.yaml", tmp_path / "log"
    words = ["plan", "calibrate", str(config), "--rounds", "1", "--out", str(out), "--json"]
    command = [sys.executable, "-m", "elastic_train.command", *words]
    ranks = [begin(command, log, place) for place in places_of(num_ranks)]
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0] * len(ranks), log.read_text()
    text = log.read_text()
    assert text.count("{") == 1, "of several ranks one speaks"
    said = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert all(said[name] > 0 for name in ("tflops_fp32", "memory_gb_per_s", "call_s", "pace", "alpha_s", "gb_per_s"))
    cluster = parse_cluster(str(out))
    assert (cluster.device.name, cluster.device.pace) == (said["device"], said["pace"])
    assert (cluster.inside.alpha_s, cluster.inside.gb_per_s) == (said["alpha_s"], said["gb_per_s"])
    assert typed(str(config), "--on", str(out), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert said["device"] in found["on"] and found["own"]["step"] > 0
