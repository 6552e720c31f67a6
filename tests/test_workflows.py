"""The workflow files run what developers run: targets of the Makefile, with actions of a named major version."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
TARGETS = set(re.findall(r"^([\w.$()/]+):", (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv"), re.MULTILINE))


def steps():
    return [step for flow in WORKFLOWS.values() for job in flow["jobs"].values() for step in job["steps"]]


def test_they_make_what_the_makefile_has():
    made = [word for step in steps() for word in re.findall(r"make (\S+)", step.get("run", ""))]
    assert {"lint", "test", "docs", "slow"} <= set(made) <= TARGETS


def test_actions_have_a_major_version():
    used = [step["uses"] for step in steps() if "uses" in step]
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", action) for action in used)


def test_they_run_the_oldest_python_that_is_promised():
    (oldest,) = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert {step["with"]["python-version"] for step in steps() if "setup-python" in step.get("uses", "")} == {oldest}


def test_lint_and_hooks_ask_the_same():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    tools = {hook["entry"].removeprefix(".venv/bin/python -m ").split(" --")[0] for hook in hooks}
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert {line.split(" -m ")[1].split(" --")[0].removesuffix(" .") for line in recipe.splitlines()[1:]} == tools
