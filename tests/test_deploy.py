"""docs/examples/deploy: what linters and published schemas say about the files, and two replicas of Ray Serve."""

import concurrent.futures
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx
import jax
import pytest

from jaxgen import Tokenizer, demo, generate, load_hf
from jaxgen.cli import options, serve_options

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: install the extra deploy")
ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "examples" / "deploy"
FILES = sorted(FOLDER.glob("*.yaml"))
LINES = "{extends: default, rules: {line-length: {max: 120}, document-start: disable, braces: {max-spaces-inside: 0}}}"
# SkyPilot 0.14: get_task_schema, get_resources_schema and get_service_schema in sky/utils/schemas.py.
SKYPILOT = {
    (): "name workdir event_callback num_nodes resources file_mounts service pool setup run envs secrets inputs "
    "outputs file_mounts_mapping config volumes volume_mounts api_server",
    (
        "resources",
    ): "cloud region zone accelerators cpus memory instance_type use_spot job_recovery disk_size disk_tier "
    "network_tier ports labels any_of ordered image_id infra priority autostop",
    ("service",): "readiness_probe pool workers replicas replica_policy load_balancing_policy tls ports",
    ("service", "readiness_probe"): "path initial_delay_seconds timeout_seconds headers post_data",
    ("service", "replica_policy"): "min_replicas max_replicas num_overprovision target_qps_per_replica "
    "upscale_delay_seconds downscale_delay_seconds dynamic_ondemand_fallback base_ondemand_fallback_replicas",
}
# KServe 0.15: the resources in config/crd/full of its repository.
RUNTIME = {
    "containers",
    "supportedModelFormats",
    "multiModel",
    "protocolVersions",
    "volumes",
    "nodeSelector",
    "tolerations",
}
MODEL = {"modelFormat", "runtime", "storageUri", "env", "args", "resources"}
PREDICTOR = {"minReplicas", "maxReplicas", "scaleTarget", "scaleMetric", "model", "nodeSelector", "tolerations"}


def documents(name: str) -> dict[str, dict]:
    """Return a file's documents by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text())}


def check_kubernetes(document: dict) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="install the extra deploy")
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def pod(spec: dict) -> dict:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}


def check_arguments(words: list[str]) -> None:
    """Raise an error if `jaxgen` does not accept a container's arguments."""
    if words[0] == "serve":
        serve_options.parse(words[1:])
    else:
        options.parse(words)


@pytest.mark.slow
def test_dockerfile_passes_hadolint():
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed: install the extra deploy")
    done = subprocess.run([linter, "--no-color", FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_copies_what_the_package_needs():
    text = (FOLDER / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()}
    needed = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}
    assert copied == needed | set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    kinds = {"cpu", *(kind for kind in ("cuda", "tpu") if kind in text)}
    extras = set(re.search(r"extras=([\w,]+) ;;", text)[1].split(",")) | kinds - {"cpu"}
    assert extras <= project["project"]["optional-dependencies"].keys()
    assert kinds == {"cpu", "cuda", "tpu"}
    check_arguments(re.findall(r'"(.*?)"', re.search(r"^CMD (.*)$", text, re.MULTILINE)[1]))


@pytest.mark.slow
def test_yaml_style():
    linter = pytest.importorskip("yamllint.linter", reason="the extra deploy is not installed")
    from yamllint.config import YamlLintConfig

    config = YamlLintConfig(LINES)
    assert [(file.name, str(each)) for file in FILES for each in linter.run(file.read_text(), config)] == []


@pytest.mark.slow
def test_gke():
    found = documents("gke.yaml")
    for document in found.values():
        check_kubernetes(document)
    spec = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    check_arguments(container["args"])
    assert spec["terminationGracePeriodSeconds"] > serve_options.parse([]).timeout
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == found["Service"]["spec"]["selector"] == labels
    with pytest.raises(Exception, match="replica"):
        check_kubernetes({**found["Deployment"], "spec": found["Deployment"]["spec"] | {"replica": 2}})


@pytest.mark.slow
def test_jobset():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="the extra deploy is not installed")
    document = documents("jobset.yaml")["JobSet"]
    assert models.JobsetV1alpha2JobSet.from_dict(document).to_dict() == document  # it leaves unknown keys out
    (job,) = document["spec"]["replicatedJobs"]
    metadata = {"name": job["name"]}
    check_kubernetes({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, **job["template"]})
    spec = job["template"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    check_arguments(container["args"])
    mesh = options.parse(container["args"]).mesh
    hosts, chips = job["template"]["spec"]["parallelism"], int(container["resources"]["limits"]["google.com/tpu"])
    topology = [int(size) for size in spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")]
    assert mesh[0] * mesh[1] == hosts * chips == topology[0] * topology[1]


@pytest.mark.slow
def test_kserve():
    found = documents("kserve.yaml")
    runtime, service = found["ServingRuntime"], found["InferenceService"]
    assert (runtime["apiVersion"], service["apiVersion"]) == ("serving.kserve.io/v1alpha1", "serving.kserve.io/v1beta1")
    assert runtime["spec"].keys() <= RUNTIME
    assert service["spec"].keys() == {"predictor"}
    assert service["spec"]["predictor"].keys() <= PREDICTOR
    assert service["spec"]["predictor"]["model"].keys() <= MODEL
    check_kubernetes(pod({"containers": runtime["spec"]["containers"]}))
    (container,) = runtime["spec"]["containers"]
    check_arguments(container["args"])
    assert serve_options.parse(container["args"][1:]).port == container["ports"][0]["containerPort"]
    formats = [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    model = service["spec"]["predictor"]["model"]
    assert (model["runtime"], model["modelFormat"]["name"]) == (runtime["metadata"]["name"], formats[0])


def test_skypilot():
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    for place, keys in SKYPILOT.items():
        part = task
        for key in place:
            part = part[key]
        assert part.keys() <= set(keys.split()), place
    extras = re.search(r"\[([\w,]+)\]", task["setup"])[1].split(",")
    assert (
        set(extras) <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    )
    words = shlex.split(task["run"])
    assert words[0] == ".venv/bin/jaxgen"
    check_arguments(words[1:])


RUN = """
import sys
from ray import serve
from ray_serve import build
serve.start(http_options={"port": int(sys.argv[1])})  # `serve run` always uses port 8000
serve.run(build(dict(word.split("=") for word in sys.argv[2:])), blocking=True)
"""


@pytest.mark.slow
def test_two_replicas_of_ray_serve(programs, tmp_path):
    pytest.importorskip("fastapi", reason="ray[serve] is not installed: install the extra deploy")
    sizes = ["replicas=2", "slots=2", "prompt_width=64", "max_new_tokens=32", "cpus=0"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", RUN, str(port), *sizes]
    environment = os.environ | programs | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    prompts = [f"Tell me a story about {number} foxes" for number in range(15)]
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(command, cwd=FOLDER, stdout=log, stderr=log, env=environment) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as http,
    ):
        try:
            while "Application 'default' is ready" not in (tmp_path / "log").read_text():
                assert process.poll() is None, (tmp_path / "log").read_text()
                time.sleep(1)
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                body = {"max_tokens": 8, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
                asked = [body | {"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
                replies = list(pool.map(lambda each: http.post("/v1/chat/completions", json=each).json(), asked))
            choices = [reply["choices"][0] for reply in replies]
            answered = re.compile(r'^jaxgen:request_success_total\{.*finished_reason="length".*\} (\S+)$', re.MULTILINE)
            counts = {count for _ in range(60) for count in map(float, answered.findall(http.get("/metrics").text))}
            with http.stream("POST", "/v1/chat/completions", json=asked[0] | {"stream": True}) as stream:
                chunks = [line for line in stream.iter_lines() if line.startswith("data: ")]
        finally:
            process.terminate()
            process.wait(60)
    assert len(chunks) > 2
    assert chunks[-1] == "data: [DONE]"
    assert len(counts) == 2  # an odd number of requests, so the replicas have answered different numbers of them
    assert sum(counts) == len(prompts)
    params, cfg = load_hf(demo.PATH)
    batch = Tokenizer.from_pretrained(demo.PATH).chat([[{"role": "user", "content": prompt}] for prompt in prompts])
    cfg = cfg.replace(do_sample=False, max_new_tokens=8, eos_token_id=None)
    out = generate(params, batch.ids, None, cfg, attention_mask=batch.attention_mask)
    expected = jax.device_get(out.sequences)[:, batch.ids.shape[1] :].tolist()
    assert [choice["token_ids"] for choice in choices] == expected
