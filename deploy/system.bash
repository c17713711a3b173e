# For the scripts of this folder, which source it: Debian systems, each a folder that debootstrap makes.

fail() {
  echo "${0##*/}: $*" >&2
  exit 1
}

table() { # row of [tool.hvd_keras] in pyproject.toml
  sed -n "/^\[tool.hvd_keras\]/,/^$/s/^$1 = \[\(.*\)\]/\1/p" pyproject.toml | tr -d '",'
}

can_isolate() {
  [[ $(id -u) == 0 ]] || fail "got the user $(id -un), expected root, for debootstrap and chroot"
  command -v debootstrap > /dev/null || fail "debootstrap is missing: apt-get install debootstrap"
}

# Starts the script again with the word "mounted" and its arguments, so that its mounts and processes end with it.
isolate() {
  can_isolate
  exec unshare --mount --pid --fork "$0" mounted "$@"
}

make_system() { # folder release [packages, with commas]
  [[ ! -e $1/complete ]] || return 0
  local components=main known=sid
  [[ $2 != jammy && $2 != noble ]] || components=main,universe known=jammy
  rm -rf "$1" && mkdir -p "$(dirname "$1")"
  # debootstrap need not know a release that is newer than it is.
  local script=/usr/share/debootstrap/scripts/$2
  [[ -e $script ]] || script=${script%/*}/$known
  debootstrap --variant=minbase --components=$components ${3:+--include="$3"} "$2" "$1" "" "$script" > "$1.log" ||
    fail "debootstrap failed: $(tail -n 3 "$1.log")"
  touch "$1/complete"
}

# The system that in_root enters, with this machine's resolver and certificates.
mount_root() { # folder
  root=$1
  cp /etc/resolv.conf "$root/etc/"
  mount -t proc proc "$root/proc"
  mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
  for device in null zero urandom random; do
    [[ -c $root/dev/$device ]] || fail "debootstrap has made no /dev/$device"
  done
  settings=()
  for name in http_proxy https_proxy no_proxy PIP_INDEX_URL; do
    [[ -z ${!name:-} ]] || settings+=("$name=${!name}")
  done
  local certificates=/etc/ssl/certs/ca-certificates.crt
  if [[ -e $certificates ]]; then
    touch "$root/etc/certificates.crt" && mount --bind "$certificates" "$root/etc/certificates.crt"
    settings+=(PIP_CERT=/etc/certificates.crt)
  fi
}

in_root() { # command
  env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive "${settings[@]}" chroot "$root" "$@"
}
