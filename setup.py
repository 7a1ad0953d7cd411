"""setup: builds the Python package of pyproject.toml, with the library in it.

With SHOAL_LIBRARY=PATH, the library that the package then loads, nothing is compiled and none is copied. All files of
the build are in build/python.
"""
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
WORK = "build/python"
VERSION = re.search(r"^VERSION *:= *(\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M).group(1)


class BuildWithLibrary(build_py):
    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)  # modules that no longer exist
        super().run()
        package = Path(self.build_lib) / "shoal"
        files = [ROOT / "include" / "shoal.h", ROOT / "python" / "shoal" / "py.typed"]
        if not os.environ.get("SHOAL_LIBRARY"):
            subprocess.run(["make", f"-j{os.cpu_count()}", "build/libshoal.so"], cwd=ROOT, check=True)
            files.append(ROOT / "build" / "libshoal.so")
        for file in files:
            shutil.copy2(file, package)
        (package / "VERSION").write_text(VERSION)


(ROOT / WORK).mkdir(parents=True, exist_ok=True)
setup(
    version=VERSION,
    cmdclass={"build_py": BuildWithLibrary},
    options={
        "build": {"build_base": WORK},
        "bdist": {"bdist_base": f"{WORK}/bdist"},
        "egg_info": {"egg_base": WORK},
        "bdist_wheel": {"plat_name": sysconfig.get_platform().replace("-", "_")},
    },
)
