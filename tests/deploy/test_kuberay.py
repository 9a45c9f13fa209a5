"""deploy/kuberay.yaml: the keys are KubeRay's, the parts fit together, and its two scripts do what they say."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

import overlord as ol
from overlord.cli.main import app

MANIFEST = Path(__file__).parents[2] / "deploy" / "kuberay.yaml"
SCHEMA = json.loads(Path(__file__).with_name("manifest.schema.json").read_text())
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": 1 << 10 * power for power, letter in enumerate("KMGT", 1)
}

Document = dict[str, Any]


def load() -> dict[str, Document]:
    documents = yaml.safe_load_all(MANIFEST.read_text())
    # Through JSON, because YAML's anchors make one object of several, and a test changes one of them.
    return {one["metadata"]["name"]: one for one in json.loads(json.dumps(list(documents)))}


@pytest.fixture
def manifest() -> dict[str, Document]:
    return load()


def amount(quantity: str | int) -> float:
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity))
    assert found, quantity
    return float(found[1]) * UNITS[found[2]]


def schema_faults(manifest: dict[str, Document]) -> list[str]:
    faults = []
    for document in manifest.values():
        one = {"$ref": f"#/$defs/{document['kind']}", "$defs": SCHEMA["$defs"]}
        faults += [error.message for error in jsonschema.Draft202012Validator(one).iter_errors(document)]
    return faults


def cluster_of(manifest: dict[str, Document]) -> Document:
    return manifest["overlord-training"]["spec"]["rayClusterSpec"]


def groups_of(manifest: dict[str, Document]) -> dict[str, Document]:
    cluster = cluster_of(manifest)
    return {"head": cluster["headGroupSpec"]} | {group["groupName"]: group for group in cluster["workerGroupSpecs"]}


def mounts(container: Document) -> dict[str, str]:
    return {one["mountPath"]: one["name"] for one in container["volumeMounts"]}


def pod_faults(manifest: dict[str, Document]) -> Iterator[str]:
    """Yield what is wrong in how the containers of the pods fit together."""
    settings = manifest["overlord-settings"]["data"]
    users = set()
    for name, group in groups_of(manifest).items():
        pod = group["template"]["spec"]
        ray, *others = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        users |= {(pod["securityContext"] | one.get("securityContext", {}))["runAsUser"] for one in pod["containers"]}
        if ray["name"] != "ray" or "command" in ray:
            yield f"{name}: container 0 is not Ray's"
        if any("gpu" in key for key in ray["resources"]["limits"]):
            yield f"{name}: Ray has GPUs"
        if group["rayStartParams"]["num-gpus"] != "0":
            yield f"{name}: Ray counts GPUs"
        if volumes[mounts(ray)["/dev/shm"]].get("emptyDir", {}).get("medium") != "Memory":
            yield f"{name}: the object store is not in memory"
        for container in pod["containers"]:
            if not set(mounts(container).values()) <= set(volumes):
                yield f"{name}/{container['name']}: mounts a volume that is not there"
            if container["envFrom"] != [{"configMapRef": {"name": "overlord-settings"}}]:
                yield f"{name}/{container['name']}: has other settings"
            if container["resources"]["requests"] != container["resources"]["limits"]:
                yield f"{name}/{container['name']}: limits are no promise"
            if mounts(container).get(settings["TMPDIR"]) != mounts(ray).get(settings["TMPDIR"], "none"):
                yield f"{name}/{container['name']}: does not see the sockets"
        for other in others:
            if mounts(other)["/dev/shm"] == mounts(ray)["/dev/shm"]:
                yield f"{name}/{other['name']}: shares Ray's memory"
    if len(users) != 1:
        yield f"users {sorted(users)}"


def test_every_key_is_known(manifest):
    assert schema_faults(manifest) == []


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m: groups_of(m)["trainers"].update(minReplica=1), "minReplica"),
        (lambda m: groups_of(m)["trainers"].pop("maxReplicas"), "maxReplicas"),
        (lambda m: groups_of(m)["trainers"]["rayStartParams"].update({"num-gpus": 0}), "0 is not of type 'string'"),
        (lambda m: groups_of(m)["head"]["template"]["spec"].update(restartPolicies="Never"), "restartPolicies"),
        (lambda m: containers(m)[0]["resources"]["limits"].update(memory="96 GB"), "96 GB"),
        (lambda m: containers(m)[1]["volumeMounts"][0].update(path="/tmp"), "'path' was unexpected"),
        (lambda m: m["overlord-training"]["spec"].update(backoffLimit="3"), "'3' is not of type 'integer'"),
        (lambda m: m["overlord-settings"]["data"].update(OVERLORD_HOSTS=4), "4 is not of type 'string'"),
    ],
)
def test_a_wrong_key_or_value_is_refused(manifest, change: Callable[[dict[str, Document]], None], fault):
    change(manifest)
    faults = schema_faults(manifest)
    assert len(faults) == 1
    assert fault in faults[0]


def containers(manifest: dict[str, Document]) -> list[Document]:
    return groups_of(manifest)["trainers"]["template"]["spec"]["containers"]


def test_the_containers_fit_together(manifest):
    assert list(pod_faults(manifest)) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m: containers(m).reverse(), "trainers: container 0 is not Ray's"),
        (lambda m: containers(m)[0]["resources"]["limits"].update({"nvidia.com/gpu": "8"}), "trainers: Ray has GPUs"),
        (lambda m: containers(m)[1]["volumeMounts"].pop(0), "trainers/trainer: does not see the sockets"),
        (lambda m: containers(m)[1].update(securityContext={"runAsUser": 0}), "users [0, 1000]"),
        (lambda m: m["overlord-settings"]["data"].update(TMPDIR="/tmp"), "trainers/trainer: does not see the sockets"),
        (lambda m: containers(m)[1].pop("envFrom") and containers(m)[1].update(envFrom=[]), "has other settings"),
    ],
)
def test_containers_that_do_not_fit_are_found(manifest, change: Callable[[dict[str, Document]], object], fault):
    change(manifest)
    assert any(fault in one for one in pod_faults(manifest))


def test_ray_gets_the_resource_that_marks_trainer_hosts(manifest):
    groups = groups_of(manifest)
    written = groups["trainers"]["rayStartParams"]["resources"]
    # The value stands in a shell command as it is; what the shell makes of it is JSON.
    assert json.loads(json.loads(written)) == {"overlord_trainer": 1}
    assert [name for name, group in groups.items() if "resources" in group["rayStartParams"]] == ["trainers"]


def test_memory_holds_budget_and_object_store(manifest):
    budget = ol.Budget().ahead_bytes(threads=2)
    for group in groups_of(manifest).values():
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        store = int(group["rayStartParams"]["object-store-memory"])
        ray = pod["containers"][0]
        assert store < amount(volumes[mounts(ray)["/dev/shm"]]["emptyDir"]["sizeLimit"])
        # Half of what is left is for processes and read buffers.
        assert amount(ray["resources"]["limits"]["memory"]) > 2 * (budget + store)


def test_numbers_that_stand_twice_agree(manifest):
    settings = manifest["overlord-settings"]["data"]
    hosts, ranks = int(settings["OVERLORD_HOSTS"]), int(settings["OVERLORD_RANKS_PER_HOST"])
    trainers = groups_of(manifest)["trainers"]
    assert {trainers[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {hosts}
    assert amount(containers(manifest)[1]["resources"]["limits"]["nvidia.com/gpu"]) == ranks
    assert ol.ClientPlaceTree.parse(settings["OVERLORD_MESH"]).world_size == hosts * ranks
    images = {group["template"]["spec"]["containers"][0]["image"] for group in groups_of(manifest).values()}
    assert len(images) == 1
    assert images.pop().endswith(f"ray{cluster_of(manifest)['rayVersion']}")
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for group in groups_of(manifest).values()
        for volume in group["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {"overlord-shared"}


def test_the_sidecar_outlives_its_trainer(manifest):
    ray = containers(manifest)[0]
    (_, _, waiting) = ray["lifecycle"]["preStop"]["exec"]["command"]
    marker = "$TMPDIR/trainer.ended"
    assert marker in waiting
    assert f'touch "{marker}"' in manifest["overlord-scripts"]["data"]["train.sh"]
    assert groups_of(manifest)["trainers"]["template"]["spec"]["restartPolicy"] == "Never"


def test_scripts_are_mounted_where_they_are_called(manifest):
    spec = manifest["overlord-training"]["spec"]
    called = {"head": spec["entrypoint"].split(), "trainers": containers(manifest)[1]["command"]}
    for group, (shell, path) in called.items():
        container = groups_of(manifest)[group]["template"]["spec"]["containers"][-1]
        assert shell == "bash"
        assert mounts(container)[str(Path(path).parent)] == "scripts"
        assert Path(path).name in manifest["overlord-scripts"]["data"]


def test_ray_knows_its_options(manifest):
    scripts = pytest.importorskip("ray.scripts.scripts")
    known = {option for parameter in scripts.start.params for option in parameter.opts}
    for group in groups_of(manifest).values():
        assert {f"--{name}" for name in group["rayStartParams"]} <= known


# The scripts, run with stand-ins for `overlord` and `torchrun`.


@pytest.fixture
def scripts(manifest, stage) -> Path:
    for name, text in manifest["overlord-scripts"]["data"].items():
        (stage.folder / name).write_text(text)
    for name, value in manifest["overlord-settings"]["data"].items():
        stage.environment.setdefault(name, value)
    stage.environment |= {"RAY_CLUSTER_NAME": "run-a", "OVERLORD_CLUSTER": "run-a", "OVERLORD_HOSTS": "2"}
    stage.environment |= {"TMPDIR": str(stage.folder), "POD_NAME": "pod", "POD_IP": "192.0.2.7"}
    return stage.folder / "shared"


def test_a_run_of_two_hosts_ends_well(scripts, stage):
    service = stage.start("serve.sh")
    hosts = [stage.start("train.sh", POD_IP=f"192.0.2.{n}", POD_NAME=f"pod-{n}") for n in (1, 2)]
    assert [host.wait(timeout=20) for host in hosts] == [0, 0]
    assert service.wait(timeout=20) == 0
    calls = stage.calls("torchrun")
    options = [dict(zip(call[1:-1:2], call[2:-1:2], strict=True)) for call in calls]
    assert sorted(one["--node-rank"] for one in options) == ["0", "1"]
    assert {one["--nnodes"] for one in options} == {"2"}
    master = (scripts / "runs" / "run-a" / "host-0").read_text().strip()
    assert {one["--master-addr"] for one in options} == {master}
    assert [call[1] for call in stage.calls("address")] == ["unix:///tmp/overlord-x"] * 2
    assert stage.position("overlord", "serve") < stage.position("torchrun") < stage.position("overlord", "stopped")
    assert (stage.folder / "trainer.ended").exists()


def test_a_trainer_that_fails_ends_the_attempt(scripts, stage):
    service = stage.start("serve.sh")
    assert stage.run("train.sh", TRAINING="fails")[0] == 3
    code, said = stage.finish(service)
    assert code == 1
    assert "a trainer failed: pod, exit code 3" in said
    assert stage.calls("overlord", "stopped")


def test_a_trainer_is_told_to_stop_before_its_pod_goes(scripts, stage):
    stage.start("serve.sh")
    host = stage.start("train.sh", TRAINING="waits")
    stage.wait_for("address")
    host.send_signal(signal.SIGTERM)
    assert host.wait(timeout=20) == 143
    assert stage.calls("torchrun", "stopped")
    assert (stage.folder / "trainer.ended").exists()


def test_a_pod_too_many_fails_the_attempt(scripts, stage):
    run = scripts / "runs" / "run-a"
    run.mkdir(parents=True)
    for number in range(2):
        (run / f"host-{number}").write_text("192.0.2.1\n")
    code, said = stage.run("train.sh")
    assert code == 1
    assert "all 2 places" in said
    assert (run / "failed").exists()
    assert stage.calls("torchrun") == []


def test_a_service_that_ends_fails_the_attempt(scripts, stage):
    code, said = stage.run("serve.sh", SERVICE="fails")
    assert code == 1
    assert "the service ended before the trainers" in said


def test_a_service_is_stopped_with_its_job(scripts, stage):
    service = stage.start("serve.sh")
    stage.wait_for("overlord", "serve")
    service.send_signal(signal.SIGTERM)
    assert service.wait(timeout=20) == 143
    assert stage.calls("overlord", "stopped")


@pytest.mark.parametrize("snapshot", [False, True])
def test_only_a_store_with_a_snapshot_is_resumed(scripts, stage, snapshot):
    (scripts / "store" / "lineage-0001").mkdir(parents=True)
    if snapshot:
        (scripts / "store" / "lineage-0001" / "snapshot-000000000016.json").touch()
    stage.run("serve.sh", SERVICE="fails")
    ((*_, last),) = stage.calls("overlord", "serve")
    assert (last == "--resume") == snapshot


def test_the_command_line_takes_what_the_scripts_give(scripts, stage):
    (scripts / "store" / "lineage-0001").mkdir(parents=True)
    (scripts / "store" / "lineage-0001" / "snapshot-000000000016.json").touch()
    stage.run("serve.sh", SERVICE="fails")
    ((_, name, *arguments),) = stage.calls("overlord")
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    found = command.make_context(name, arguments).params
    assert found["resume"] is True
    assert str(found["runtime"]) == "ray"
    assert found["ranks_per_host"] == 8
