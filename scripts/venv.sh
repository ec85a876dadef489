# Sourced by the other scripts from the root of the checkout: does all the set-up. It installs the system packages that are
# missing, creates a virtual environment with fcsd and its development tools, and activates it.
# FCSD_VENV names another directory than .venv; an environment that is up to date is used as it is.
source scripts/system_packages.sh
venv="${FCSD_VENV:-.venv}"
if [ ! -x "$venv/bin/python" ]; then
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fcsd needs Python 3.11 or newer" >&2; exit 1; }
  python3 -m venv "$venv"
fi
source "$venv/bin/activate"
here="$PWD $(cat pyproject.toml constraints.txt | sha256sum)"
if [ "$(cat "$venv/fcsd-installed" 2>/dev/null)" != "$here" ]; then
  # DeepSpeed compiles each operator when it is first used; compiling all of them now would need a CUDA toolkit.
  DS_BUILD_OPS=0 python -m pip install --no-compile --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev]'
  python -m compileall -qq -j 0 "$venv/lib" || true # on all cores, where pip takes one; some packages ship files for others
  echo "$here" > "$venv/fcsd-installed"
fi
