"""The built package, outside the checkout, without Horovod."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

TRAIN = """
import pathlib, sys
import torch, edpsgd
assert pathlib.Path(edpsgd.__file__).is_relative_to(sys.prefix), edpsgd.__file__
try:
    import horovod
except ImportError:
    pass
else:
    raise SystemExit("this environment was to be without Horovod")
torch.manual_seed(0)
model = torch.nn.Linear(5, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
optimizer = edpsgd.PrivateOptimizer(
    optimizer, model.named_parameters(), clip_norm=1.0, noise_multiplier=0.01, noise_decay=edpsgd.LinearDecay(0.05)
)
inputs = torch.randn(64, 5)
labels = (inputs.sum(1) > 0).long()
for epoch in range(30):
    optimizer.set_epoch(epoch)
    for batch in torch.randperm(64).split(16):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()
accuracy = (model(inputs).argmax(1) == labels).float().mean()
assert accuracy > 0.9, accuracy
assert sum(event.steps for event in optimizer.ledger.events) == 120
print("trained")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_plugin_and_nothing_else(wheel) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert {t for t in top if not t.endswith(".dist-info")} == {"edpsgd"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "edpsgd").rglob("*.py")}
    assert {n for n in names if n.startswith("edpsgd/")} == modules | {"edpsgd/privacy.md", "edpsgd/py.typed"}


@pytest.mark.timeout(600)
def test_it_trains_in_a_clean_environment(wheel, tmp_path) -> None:
    venv.create(tmp_path / "env")
    python = str(tmp_path / "env" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True, cwd=tmp_path)
    done = subprocess.run([python, "-c", TRAIN], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "trained\n", done.stderr
    command = [str(tmp_path / "env" / "bin" / "edpsgd"), "plan", "--epsilon", "8", "--delta", "1e-6"]
    plan = [*command, "--examples", "1000", "--batch", "10", "--epochs", "3"]
    done = subprocess.run(plan, cwd=tmp_path, capture_output=True, text=True)
    assert "needs noise multiplier z0 = " in done.stdout, done.stderr
