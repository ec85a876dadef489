# Sourced by the other scripts from the root of the checkout: does all the set-up. It installs the system packages that are
# missing, creates a virtual environment with fcsd and the extras in `extras` (dev, the tools of development, unless it is
# set before), and activates it. uv installs if it is here, else pip, by the same constraints.txt.
# FCSD_VENV names another directory than .venv; an environment that is up to date is used as it is.
source scripts/system_packages.sh
extras="${extras:-dev}"
venv="${FCSD_VENV:-.venv}"
if [ ! -x "$venv/bin/python" ]; then
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fcsd needs Python 3.11 or newer" >&2; exit 1; }
  python3 -m venv "$venv"
fi
source "$venv/bin/activate"
unset PYTHONDONTWRITEBYTECODE # modules are compiled when they are first imported, and not again by each further process
here="$PWD $(cat pyproject.toml constraints.txt | sha256sum)"
installed="$(cat "$venv/fcsd-installed" 2>/dev/null || true)"
if [ "$installed" != "$here dev" ] && [ "$installed" != "$here $extras" ]; then  # dev has what the others need
  # Python compiles a module when it is first imported; to compile all of them now would take longer than to install them.
  install=(python -m pip install --disable-pip-version-check --quiet --no-compile)
  if command -v uv >/dev/null; then install=(uv pip install --quiet); fi
  # DeepSpeed compiles each operator when it is first used; compiling all of them now would need a CUDA toolkit.
  DS_BUILD_OPS=0 "${install[@]}" --constraint constraints.txt --editable ".[$extras]"
  echo "$here $extras" > "$venv/fcsd-installed"
fi
