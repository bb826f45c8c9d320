# shellcheck shell=bash
# Shell functions for scripts/quickstart, scripts/test and .ci/run: install what is missing, build.
# Source it from bash with `set -euo pipefail`. Messages go to stderr.

GRADWIRE_ROOT_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

gw_say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# The lines of the given sections of scripts/packages.txt.
gw_packages() {
  awk -v wanted=" $* " '
    { sub(/#.*/, ""); gsub(/[ \t]/, "") }
    /^\[.*\]$/ { section = substr($0, 2, length($0) - 2); next }
    $0 != "" && index(wanted, " " section " ") { print }
  ' "$GRADWIRE_ROOT_DIR/scripts/packages.txt"
}

gw_is_installed() {
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# The name out of a|b that apt can install here; the first if it knows none.
gw_choose() {
  local name
  for name in ${1//|/ }; do
    if [ -n "$(apt-cache policy "$name" 2>/dev/null | sed -n '/Candidate: [^(]/p')" ]; then
      echo "$name"
      return
    fi
  done
  echo "${1%%|*}"
}

# Installs what is missing of the given sections; asks nothing. Exits with 2 where it cannot.
gw_install() {
  local line name found missing=() chosen=()
  if ! command -v dpkg-query >/dev/null; then
    gw_say "not a Debian system: assuming that the packages of scripts/packages.txt are there"
    return 0
  fi
  while read -r line; do
    found=
    for name in ${line//|/ }; do
      if gw_is_installed "$name"; then found=$name; break; fi
    done
    [ -n "$found" ] || missing+=("$line")
  done < <(gw_packages "$@")
  [ ${#missing[@]} -gt 0 ] || return 0

  if [ "$(id -u)" != 0 ]; then
    for line in "${missing[@]}"; do chosen+=("$(gw_choose "$line")"); done
    gw_say "missing packages; as root run:"
    printf '  apt-get update && apt-get install -y --no-install-recommends %s\n' "${chosen[*]}" >&2
    exit 2
  fi
  gw_say "installing: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # Another apt (an update at boot, a second script) may hold the locks for a while. Its lock on the
  # package lists has no timeout option, hence the attempts.
  local apt=(apt-get -q -o DPkg::Lock::Timeout=600 -o Acquire::Retries=3) try
  for try in 1 2 3 4 5; do
    if "${apt[@]}" update >&2; then break; fi
    gw_say "apt-get update failed (attempt $try of 5)"
    sleep $((try * 5))
  done
  # Only now are the lists there that know what this release calls it.
  for line in "${missing[@]}"; do chosen+=("$(gw_choose "$line")"); done
  if ! "${apt[@]}" install -y --no-install-recommends "${chosen[@]}" >&2; then
    gw_say "apt-get could not install: ${chosen[*]}"
    exit 2
  fi
}

# How many compilers to run: by cores, and 2 GiB of free memory for each.
gw_jobs() {
  if [ -n "${CMAKE_BUILD_PARALLEL_LEVEL:-}" ]; then
    echo "$CMAKE_BUILD_PARALLEL_LEVEL"
    return
  fi
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable:/ { print int($2 / 2097152) }' /proc/meminfo)
  [ "$memory" -ge 1 ] || memory=1
  echo $((cores < memory ? cores : memory))
}

# For every cmake that follows, also inside workflow presets.
gw_build_environment() {
  CMAKE_BUILD_PARALLEL_LEVEL=$(gw_jobs)
  export CMAKE_BUILD_PARALLEL_LEVEL
  export NINJA_STATUS="[%f/%t, %es] "
  if command -v ccache >/dev/null; then
    export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
  fi
}

# gw_build PRESET [TARGET...]: configures and builds (all, if no target is named).
gw_build() {
  local preset=$1
  shift
  gw_build_environment
  gw_say "building preset $preset with $CMAKE_BUILD_PARALLEL_LEVEL job(s)"
  (
    cd "$GRADWIRE_ROOT_DIR" || exit 1
    # What CMake found once may have gone, or come, since; its output matters only if it fails.
    output=$(cmake --preset "$preset" 2>&1) || { printf '%s\n' "$output" >&2; exit 1; }
    cmake --build --preset "$preset" ${1:+--target "$@"} >&2
  )
}
