"""What users install: a wheel that runs the quick start in a fresh environment, an sdist, and types that mypy reads."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import attention_engine
from tests.typing.strict import check

ROOT = Path(__file__).parents[1]


def run(*command, cwd):
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and an sdist, made in a copy of the tree, so that nothing is written into it."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for entry in ROOT.iterdir():
        hidden = entry.name.startswith(".") and entry.name not in (".github", ".pre-commit-config.yaml")
        if entry.name not in ("build", "dist") and not hidden:
            (copy / entry.name).symlink_to(entry)
    (copy / "attention_engine").unlink()
    for path in (ROOT / "attention_engine").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (*_, egg) = (None, *copy.glob("*.egg-info"))
    if egg is not None:
        egg.unlink()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ".", cwd=copy)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_holds_the_package_and_nothing_else(built):
    names = set(zipfile.ZipFile(built[0]).namelist())
    files = {str(p.relative_to(ROOT)) for p in (ROOT / "attention_engine").rglob("*") if p.is_file()}
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == {name for name in files if "__pycache__" not in name} and "attention_engine/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_what_the_tests_need(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    named = "pyproject.toml Makefile constraints.txt mkdocs.yml CHANGELOG.md CONTRIBUTING.md LICENSE README.md"
    named += " .pre-commit-config.yaml .github/workflows/checks.yml .github/workflows/slow.yml"
    assert set(named.split()) <= names
    for folder in ("tests", "docs", "attn_script", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert str(path.relative_to(ROOT)) in names, path


def test_a_fresh_environment_runs_the_quick_start_from_the_wheel(built, tmp_path):
    """Its own packages are the wheel alone; torch, sympy and TileLang are read where they are already."""
    home = tmp_path / "fresh"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built[0], cwd=tmp_path)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:1]
    shown = "import attention_engine\nprint(attention_engine.__file__, *out.shape, q.grad.abs().sum().item() > 0)"
    (tmp_path / "quick_start.py").write_text("\n".join([*blocks, shown]))
    out = run(python, "-W", "ignore", "-I", tmp_path / "quick_start.py", cwd=tmp_path).splitlines()[-1]
    assert out.split() == [str(packages / "attention_engine" / "__init__.py"), "2", "256", "4", "64", "True"]


@pytest.mark.parametrize(("change", "complaint"), [
    (None, None),
    (('backend="reference"', "backend=3"), '"AttentionEngine" has incompatible type "Literal[3]"; expected "Literal'),
    (("assert_type(engine.program(), str)", "assert_type(engine.program(), int)"), "Expression is of type"),
], ids=["right", "a wrong argument", "a wrong result"])  # fmt: skip
def test_a_users_script_is_clean_under_mypy_and_a_wrong_one_is_not(change, complaint, tmp_path):
    script = (ROOT / "tests" / "typing" / "user_script.py").read_text()
    if change is not None:
        assert change[0] in script
        script = script.replace(*change)
    status, said = check(script, tmp_path)
    if complaint is None:
        assert (status, said) == (0, "Success: no issues found in 1 source file\n"), said
    else:
        assert status == 1 and complaint in said


def test_the_version_is_said_once_and_the_same():
    assert f'\nversion = "{attention_engine.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_every_extra_of_the_tests_has_a_pinned_version():
    pyproject = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dev = \[(.*?)^\]", pyproject, re.DOTALL | re.MULTILINE)[1]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    for name in re.findall(r'"([\w-]+)(?:\[\w+\])?[>=]', listed):
        assert name.lower() in pinned, name
