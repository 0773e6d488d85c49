"""The decode API with torch, triton, transformers and safetensors alone: all else is blocked.

Blocked is every installed distribution that these four (and numpy, which they bring along) do not
need themselves; hydra, omegaconf, wandb, datasets, accelerate and deepspeed are blocked by name,
installed or not.
"""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("torch", "triton", "transformers", "safetensors")
NEVER = {"hydra", "omegaconf", "wandb", "datasets", "accelerate", "deepspeed"}
PROBE = """
import sys
from importlib.machinery import PathFinder

class Hider(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.split(".")[0] in {blocked!r}
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hider
from mtp_research import EngineConfig, SamplingParams, SpecDecoder, load_heads, load_target

target = load_target("assets/lab_tiny/target", dtype="float32", device="cpu")
heads = load_heads("assets/lab_tiny/heads/chain_n3", target)
decoder = SpecDecoder(target, heads, engine=EngineConfig(max_num_requests=2))
sampling = SamplingParams(max_new_tokens=8)
outputs = list(decoder.generate([[0, 3, 100, 101, 4], [0, 300, 301]], sampling=sampling))
assert [len(output.output_token_ids) for output in outputs] == [8, 8], outputs
assert decoder.stats.audit["HOLE"] == 0 and decoder.stats.acceptance_length >= 1
loaded = {{name.split(".")[0] for name in sys.modules}} & {blocked!r}
assert not loaded, loaded
print("decoded")
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_distributions() -> set[str]:
    """The four and all that they require, extras left out."""
    found: set[str] = set()
    todo = [*NEEDED]
    while todo:
        name = normal(todo.pop())
        if name in found:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform or Python
            continue
        found.add(name)
        for requirement in requirements:
            required, _, marker = requirement.partition(";")
            if "extra" not in marker:
                todo.append(re.split(r"[\s<>=!~\[(]", required.strip())[0])
    return found


def blocked_packages() -> set[str]:
    needed = needed_distributions()
    return NEVER | {
        package
        for package, distributions in metadata.packages_distributions().items()
        if not {normal(name) for name in distributions} & needed and package.isidentifier()
    } - {"mtp_research", "_distutils_hack"}


def test_generate_runs_with_every_other_package_blocked() -> None:
    blocked = blocked_packages()
    assert blocked >= {"hydra", "omegaconf", "wandb", "datasets", "accelerate", "deepspeed"}
    assert not blocked & {"torch", "triton", "transformers", "safetensors", "numpy"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(blocked=blocked)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "decoded"
