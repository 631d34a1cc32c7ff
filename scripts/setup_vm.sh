#!/bin/sh
# Fetches what the microvm sandbox needs into DIR, without root, from the distribution's own packages (Debian or Ubuntu, x86_64):
# QEMU with its libraries, a kernel for virtual machines, and a small root disk (shell, core tools, Python). About 300 MB and a minute.
# usage: scripts/setup_vm.sh [DIR]          default: $ROLLMILL_HOME/vm, else ~/.cache/rollmill/vm; PYTHON picks the interpreter
set -eu
dir=${1:-${ROLLMILL_HOME:-$HOME/.cache/rollmill}/vm}
python=${PYTHON:-python3}
for tool in apt-get apt-cache dpkg-deb tar; do
    command -v $tool > /dev/null || { echo "setup_vm.sh needs $tool; on other distributions install QEMU and see docs/microvm.md" >&2; exit 1; }
done
test "$(uname -m)" = x86_64 || { echo "setup_vm.sh knows x86_64 only, this is $(uname -m)" >&2; exit 1; }
mkdir -p "$(dirname "$dir")"
dir=$(cd "$(dirname "$dir")" && pwd)/$(basename "$dir")
new=$dir.new
test ! -e "$dir" || test -e "$dir/base.json" || { echo "$dir exists and was not made by setup_vm.sh; choose another folder" >&2; exit 1; }
rm -rf "$new"
mkdir -p "$new/debs" "$new/unpacked" "$new/kernel/modules" "$new/root"

fetch() ( # NAME...: packages into debs/NAME.deb
    mkdir -p "$new/fetch" && cd "$new/fetch"
    apt-get -qq download "$@" 2> ../fetch.log || { cat ../fetch.log >&2; exit 1; }
    for deb in *.deb; do mv "$deb" "../debs/${deb%%_*}.deb"; done
)
unpack() { # NAME DIR; keeps a folder that is a link, which merged /usr needs
    dpkg-deb --fsys-tarfile "$new/debs/$1.deb" | tar -x --keep-directory-symlink --no-same-owner -C "$2"
}
closure() { # NAME...: the packages and what they depend on
    apt-cache depends --recurse --important --no-recommends --no-suggests "$@" | grep '^[a-z0-9]' | sort -u
}

echo "fetching QEMU ..."
# Installed libraries of this machine serve as they are: only what an installation would add is fetched.
missing=$(apt-get -s --no-install-recommends install qemu-system-x86 erofs-utils lz4 2> /dev/null | awk '/^Inst/ {print $2}' | grep -v -e systemd -e '^udev$' -e ipxe || true)
if [ -n "$missing" ]; then
    fetch $missing
    for name in $missing; do unpack "$name" "$new/unpacked"; done
fi
mkdir "$new/bin"
libraries=$new/unpacked/usr/lib/x86_64-linux-gnu:$new/unpacked/lib/x86_64-linux-gnu
for name in qemu-system-x86_64 mkfs.erofs lz4; do
    found=$new/unpacked/usr/bin/$name
    test -x "$found" || found=$(command -v $name)
    ln -s "$(realpath --relative-to="$new/bin" "$found")" "$new/bin/$name"
done

echo "fetching a kernel ..."
kernel=$(apt-cache depends --important linux-image-cloud-amd64 2> /dev/null | awk '/Depends: linux-image-/ {print $2; exit}')
kernel=${kernel:-$(apt-cache depends --important linux-image-virtual 2> /dev/null | awk '/Depends: linux-image-/ {print $2; exit}')}
fetch "$kernel"
mkdir "$new/linux"
unpack "$kernel" "$new/linux"
LD_LIBRARY_PATH=$libraries "$python" - "$new" <<'PY'
"""The kernel out of its self-extracting wrapper (unpacking it inside a slow machine takes a second), and the modules in load order."""
import lzma, pathlib, shutil, struct, subprocess, sys, zlib

new = pathlib.Path(sys.argv[1])
image = next((new / "linux/boot").glob("vmlinuz-*")).read_bytes()
begin = ((image[0x1F1] or 4) + 1) * 512 + struct.unpack_from("<I", image, 0x248)[0]
packed = image[begin : begin + struct.unpack_from("<I", image, 0x24C)[0] - 4]
if packed[:4] == b"\x02\x21\x4c\x18":
    plain = subprocess.run([new / "bin/lz4", "-dc"], input=packed, stdout=subprocess.PIPE, check=True).stdout
elif packed[:4] == b"\x28\xb5\x2f\xfd":
    plain = subprocess.run(["zstd", "-dc"], input=packed, stdout=subprocess.PIPE, check=True).stdout
elif packed[:2] == b"\x1f\x8b":
    plain = zlib.decompressobj(31).decompress(packed)
else:
    plain = lzma.LZMADecompressor().decompress(packed)
if plain[:4] != b"\x7fELF":
    sys.exit("the kernel is packed in a way this script does not know")
(new / "kernel/vmlinux").write_bytes(plain)

modules = next((new / "linux").glob("*/modules/*")) if (new / "linux/lib/modules").is_dir() else next((new / "linux/usr/lib/modules").iterdir())
files = {path.name.split(".ko")[0].replace("-", "_"): path for path in modules.rglob("*.ko*")}
wanted = "virtio_mmio virtio_blk virtio_console vmw_vsock_virtio_transport erofs overlay".split()
order = []


def depends(path):
    """What a module names in its own `depends=` line."""
    data = path.read_bytes()
    at = data.find(b"\0depends=") + 9
    return [name.decode().replace("-", "_") for name in data[at : data.index(b"\0", at)].split(b",") if name] if at > 8 else []


def add(name):
    if name in files and name not in order:
        path = files[name]
        if path.suffix == ".xz":
            path.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
            path = files[name] = path.with_suffix("")
        elif path.suffix != ".ko":
            sys.exit(f"the kernel's modules are packed in a way this script does not know: {path.name}")
        for other in depends(path):
            add(other)
        order.append(name)


for name in wanted:
    add(name)  # one that is missing is built into the kernel
for name in order:
    shutil.copyfile(files[name], new / f"kernel/modules/{name}.ko")
(new / "kernel/modules.list").write_text("".join(f"{name}.ko\n" for name in order))
PY

echo "making the root disk ..."
names=$(closure base-files base-passwd bash coreutils diffutils findutils grep gzip hostname mawk procps python3 sed tar util-linux dash libc-bin \
    | grep -v -e perl -e gawk -e original-awk -e debconf -e debian-installer -e elogind -e newt -e slang -e usrmerge -e install-info -e '^dpkg$' -e textwrap -e init-system)
fetch $names
for folder in bin sbin lib lib64; do mkdir -p "$new/root/usr/$folder"; ln -s "usr/$folder" "$new/root/$folder"; done
for name in $names; do unpack "$name" "$new/root"; done
cd "$new/root"
mkdir -p dev proc sys run tmp mnt srv etc/profile.d home/dev/work var/tmp var/log
chmod 1777 tmp var/tmp
ln -sf mawk usr/bin/awk
ln -sf dash usr/bin/sh
cp usr/share/base-passwd/passwd.master etc/passwd
cp usr/share/base-passwd/group.master etc/group
echo 'dev:x:1000:1000:dev:/home/dev:/bin/bash' >> etc/passwd
echo 'dev:x:1000:' >> etc/group
printf '127.0.0.1 localhost\n::1 localhost\n' > etc/hosts
printf 'passwd: files\ngroup: files\nhosts: files\n' > etc/nsswitch.conf
echo debian > etc/hostname
: > etc/machine-id
for file in .bashrc .profile; do test ! -e etc/skel/$file || cp etc/skel/$file home/dev/; done
rm -rf usr/share/doc usr/share/man usr/share/locale usr/share/lintian
loader=lib64/ld-linux-x86-64.so.2
for interpreter in usr/bin/python3.*[0-9]; do
    # Compiled once here and not in every machine, whose user may not write beside the modules.
    PYTHONHOME=usr "$loader" --library-path lib/x86_64-linux-gnu:usr/lib/x86_64-linux-gnu "$interpreter" -m compileall -q -s "$PWD" usr/lib/python3* > /dev/null || true
done
owner=--all-root
if [ "$(id -u)" = 0 ]; then chown -R 0:0 . && chown -R 1000:1000 home/dev && owner=; fi
LD_LIBRARY_PATH=$libraries "$new/bin/mkfs.erofs" $owner "$new/base.erofs" . > "$new/mkfs.log" 2>&1 || { cat "$new/mkfs.log" >&2; exit 1; }
cat > "$new/base.json" <<'JSON'
{"schema": 1, "name": "host", "workdir": "/home/dev/work", "home": "/home/dev", "user": "dev", "uid": 1000, "gid": 1000, "shell": "/bin/bash", "hostname": "debian",
 "env": {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/home/dev", "USER": "dev", "LOGNAME": "dev", "SHELL": "/bin/bash", "LANG": "C.UTF-8"}}
JSON
cd "$new"
rm -rf debs fetch fetch.log linux root mkfs.log
rm -rf "$dir"
mv "$new" "$dir"
echo "the microvm sandbox is ready in $dir"
