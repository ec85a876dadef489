# Sourced by venv.sh: makes sure that the machine has the system packages that fcsd needs. Root on Debian or Ubuntu gets
# what is missing from apt-get; everybody else is told at once what to type. Nothing is asked for where nothing is missing.
missing=() # Debian's names
command -v python3 > /dev/null || missing+=(python3)
[ -x "${FCSD_VENV:-.venv}/bin/python" ] || python3 -c 'import ensurepip' 2> /dev/null || missing+=(python3-venv)
command -v gcc > /dev/null || missing+=(gcc)
gcc -E - <<< '#include <stdio.h>' > /dev/null 2>&1 || missing+=(libc6-dev)
command -v bwrap > /dev/null || missing+=(bubblewrap)
if [ ${#missing[@]} -gt 0 ]; then
  if ! command -v apt-get > /dev/null; then
    echo "fcsd needs system packages that are missing. Debian calls them: ${missing[*]}. Install them, then start this again." >&2
    exit 1
  elif [ "$(id -u)" -ne 0 ]; then
    echo "fcsd needs system packages that are missing. Type this, then start this again:" >&2
    echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  echo "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}"
fi
