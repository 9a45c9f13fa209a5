"""deploy/slurm.sh: its options are Slurm's, and it starts, stops and resumes in the right order."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest
import typer.main

from overlord.cli.main import app

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm.sh"
README = SCRIPT.with_name("README.md")

# The long options of sbatch, as its manual names them.
SBATCH = r"""
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container container-id
contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution
error exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type
mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes
ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output overcommit
oversubscribe parsable partition prefer priority profile propagate qos quiet reboot requeue reservation resv-ports
segment signal sockets-per-node spread-job stepmgr switches test-only thread-spec threads-per-core time time-min tmp
tres-bind tres-per-task uid use-min-nodes verbose wait wait-all-nodes wckey wrap
"""
SRUN = {"overlap", "nodes", "ntasks", "nodelist", "cpus-per-task", "ntasks-per-node", "kill-on-bad-exit"}


@pytest.fixture
def slurm(stage):
    """A job of two nodes, as Slurm describes it to its script; with a folder in /tmp as the script makes it."""
    number = f"test-{stage.folder.name}"
    stage.environment |= {
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node1,node2",
        "SLURM_CPUS_PER_TASK": "96",
    }
    yield stage
    for folder in Path("/tmp").glob(f"overlord-{number}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def run(stage, *arguments: str, **environment: str) -> tuple[int, str]:
    return stage.run(str(SCRIPT), "job.yaml", "train.py", *arguments, **environment)


def start(stage, **environment: str) -> subprocess.Popen[str]:
    return stage.start(str(SCRIPT), "job.yaml", "train.py", **environment)


def options(call: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").partition("=")[::2] for word in call if word.startswith("--"))


def test_the_shell_reads_it():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert SCRIPT.stat().st_mode & 0o100


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    found = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_options_are_slurms():
    text = SCRIPT.read_text()
    given = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?$", text, re.MULTILINE)
    assert len(given) == text.count("\n#SBATCH")
    assert set(given) <= set(re.findall(r"\S+", SBATCH))
    assert {"requeue", "open-mode", "signal"} <= set(given)
    # Behind the first command Slurm reads no more of them.
    assert text.rindex("\n#SBATCH") < text.index("\nset -euo pipefail")


def test_a_run_goes_up_and_down_in_order(slurm):
    code, said = run(slurm, "--lr", "1e-4")
    assert code == 0, said
    order = [("ray", "start", "--head"), ("overlord", "serve"), ("torchrun",), ("overlord", "stopped")]
    places = [slurm.position(*call) for call in [*order, ("ray", "stopped")]]
    assert places == sorted(places)
    before = slurm.calls()[: slurm.position("overlord", "serve")]
    assert before.count(["python"]) == 2  # it waited for the second node
    assert len(slurm.calls("ray", "stopped")) == 2
    assert slurm.calls("scontrol", "requeue") == []
    assert slurm.calls("address") == [["address", "unix:///tmp/overlord-x"]]


def test_ray_runs_on_every_node_and_leaves_the_gpus_alone(slurm):
    run(slurm)
    steps = {options(call)["nodelist"]: call for call in slurm.calls("srun") if "ray" in call}
    assert {node: "--head" in call for node, call in steps.items()} == {"node1": True, "node2": False}
    head, other = options(steps["node1"]), options(steps["node2"])
    assert other["address"] == f"{head['node-ip-address']}:{head['port']}"
    for call in slurm.calls("ray", "start"):
        assert options(call)["num-gpus"] == "0"
        assert options(call)["num-cpus"] == "32"
        assert '--resources={"overlord_trainer": 1}' in call
    for call in slurm.calls("srun"):
        own = list(takewhile(lambda word: word.startswith("--"), call[1:]))
        assert "overlap" in options(own)
        assert set(options(own)) <= SRUN


def test_one_secret_for_all_nodes_and_another_for_the_next_attempt(slurm):
    run(slurm)
    run(slurm, SLURM_RESTART_COUNT="1")
    tokens = [token for _, token in slurm.calls("token")]
    assert len(tokens) == 4
    assert len(set(tokens)) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in tokens)


def test_torchrun_gets_the_trainer_and_its_arguments(slurm):
    run(slurm, "--name", "two words")
    (call,) = slurm.calls("torchrun")
    assert call[-3:] == ["train.py", "--name", "two words"]
    given = dict(zip(call[1:-3:2], call[2:-3:2], strict=True))
    assert given["--nnodes"] == "2"
    assert given["--node-rank"] == "0"
    assert given["--nproc-per-node"] == "8"


def test_ray_knows_its_options(slurm):
    scripts = pytest.importorskip("ray.scripts.scripts")
    known = {option.removeprefix("--") for parameter in scripts.start.params for option in parameter.opts}
    run(slurm)
    for call in slurm.calls("ray", "start"):
        assert set(options(call)) <= known


@pytest.mark.parametrize("snapshot", [False, True])
def test_only_a_store_with_a_snapshot_is_resumed(slurm, snapshot):
    store = slurm.folder / "shared" / "store"
    store.mkdir(parents=True)
    if snapshot:
        (store / "lineage-0001").mkdir()
        (store / "lineage-0001" / "snapshot-000000000016.json").touch()
    assert run(slurm)[0] == 0
    ((*_, last),) = slurm.calls("overlord", "serve")
    assert (last == "--resume") == snapshot


def test_an_address_of_an_earlier_attempt_is_not_taken(slurm):
    shared = slurm.folder / "shared"
    shared.mkdir()
    old = shared / f"address-{slurm.environment['SLURM_JOB_ID']}-0"
    old.write_text("unix:///tmp/overlord-old\n")
    assert run(slurm)[0] == 0
    assert slurm.calls("address") == [["address", "unix:///tmp/overlord-x"]]
    assert not old.exists()


def test_a_trainer_that_fails_fails_the_job_and_all_is_stopped(slurm):
    assert run(slurm, TRAINING="fails")[0] == 3
    assert len(slurm.calls("ray", "stopped")) == 2
    assert len(slurm.calls("overlord", "stopped")) == 1
    assert slurm.calls("scontrol", "requeue") == []


def test_trainers_do_not_wait_for_a_service_that_died(slurm):
    code, said = run(slurm, SERVICE="dies", TRAINING="waits")
    assert code == 1
    assert "the service ended before the trainers" in said
    assert slurm.calls("torchrun", "stopped")
    assert len(slurm.calls("ray", "stopped")) == 2


def test_a_service_that_does_not_start_ends_the_job(slurm):
    code, said = run(slurm, SERVICE="fails")
    assert code == 1
    assert "the service ended" in said
    assert slurm.calls("torchrun") == []


def test_nodes_that_do_not_come_end_the_job(slurm):
    code, said = run(slurm, SLURM_JOB_NODELIST="node1,node2,node3,node4,node5,node6,node7,node8", OVERLORD_PATIENCE="0")
    assert code == 1
    assert "1 of 8 nodes came up" in said
    assert slurm.calls("overlord") == []
    assert len(slurm.calls("ray", "stopped")) == len(slurm.calls("ray", "start"))


@pytest.mark.parametrize(
    ("sent", "code", "again"),
    [(signal.SIGTERM, 143, False), (signal.SIGUSR1, 0, True)],
    ids=["preempted", "time limit"],
)
def test_a_signal_stops_readers_first_and_only_the_time_limit_queues_again(slurm, sent, code, again):
    job = start(slurm, TRAINING="waits")
    slurm.wait_for("address")
    job.send_signal(sent)
    assert job.wait(timeout=20) == code
    places = [slurm.position(name, "stopped") for name in ("torchrun", "overlord", "ray")]
    assert places == sorted(places)
    requeued = slurm.calls("scontrol", "requeue")
    assert requeued == ([["scontrol", "requeue", slurm.environment["SLURM_JOB_ID"]]] if again else [])
    if again:  # it ends the script, so nothing may be left to do
        assert slurm.calls()[-1] == requeued[0]


def test_nothing_is_left(slurm):
    assert run(slurm)[0] == 0
    assert not list(Path("/tmp").glob(f"overlord-{slurm.environment['SLURM_JOB_ID']}*"))
    assert [path.name for path in (slurm.folder / "shared").iterdir()] == ["store"]


def test_folders_are_private(slurm):
    job = start(slurm, TRAINING="waits")
    slurm.wait_for("address")
    (folder,) = Path("/tmp").glob(f"overlord-{slurm.environment['SLURM_JOB_ID']}-*")
    modes = [path.stat().st_mode & 0o777 for path in (folder, slurm.folder / "shared" / "store")]
    job.send_signal(signal.SIGTERM)
    job.wait(timeout=20)
    assert modes == [0o700, 0o700]


@pytest.mark.parametrize("wrong", ["writable by all", "of another user"])
def test_a_shared_folder_that_others_write_to_is_refused(slurm, wrong):
    shared = slurm.folder / "shared"
    shared.mkdir()
    if wrong == "writable by all":
        shared.chmod(0o777)
    elif os.getuid():
        pytest.skip("only root gives a folder away")
    else:
        os.chown(shared, 12345, -1)
    code, said = run(slurm)
    assert code == 2
    assert "OVERLORD_SHARED" in said
    assert slurm.calls("ray") == []


def test_a_folder_of_another_user_in_tmp_is_not_taken(slurm, tmp_path):
    if os.getuid():
        pytest.skip("only root gives a folder away")
    taken = slurm.folder / "taken"
    taken.mkdir(mode=0o700)
    os.chown(taken, 12345, -1)
    take = "\n".join(re.findall(r"^take_folder\+?='.*'$", SCRIPT.read_text(), re.MULTILINE)) + '\neval "$take_folder"'
    link = slurm.folder / "link"
    link.symlink_to(tmp_path)
    loose = slurm.folder / "loose"
    loose.mkdir()
    loose.chmod(0o755)
    for folder, code in ((taken, 1), (link, 1), (loose, 1), (slurm.folder / "new", 0)):
        done = subprocess.run(["bash", "-c", take], env={**os.environ, "TMPDIR": str(folder)}, capture_output=True)
        assert done.returncode == code, folder


def test_without_arguments_it_says_what_it_takes(slurm):
    code, said = slurm.run(str(SCRIPT))
    assert code == 2
    assert "usage" in said
    assert slurm.calls() == []


def test_the_command_line_takes_what_the_script_gives(slurm):
    run(slurm)
    ((_, name, *arguments),) = slurm.calls("overlord", "serve")
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    found = command.make_context(name, arguments).params
    assert found["mesh"] == "dp=16"
    assert found["ranks_per_host"] == 8


def test_the_readmes_links_and_variables_are_there():
    text = README.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith("http") or (README.parent / target).exists(), target
    known = SCRIPT.read_text() + SCRIPT.with_name("kuberay.yaml").read_text()
    named = set(re.findall(r"OVERLORD_[A-Z_]+", text))
    assert named
    assert {name for name in named if name not in known} == set()
