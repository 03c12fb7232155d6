# The first process of a node, in its network, mount, UTS, cgroup and PID namespaces: makes the node's root and stays.
# $1: name of the node; $2: its directory; $3: file for its process id; the rest: directories that it sees.
set -e
name=$1 directory=$2 ready=$3
shift 3
read -r pid rest </proc/self/stat
root=$directory/root
hostname "$name"
mkdir -p "$directory/scratch" "$root" "$directory/kubelet" "$directory/containerd"
mount -t tmpfs tmpfs "$directory/scratch"
mkdir "$directory/scratch/upper" "$directory/scratch/work" "$directory/scratch/sysctl"
mount -t overlay overlay -o "lowerdir=/,upperdir=$directory/scratch/upper,workdir=$directory/scratch/work" "$root"
mount -t proc proc "$root/proc"

# The kubelet writes these, which are settings of the whole machine: it finds files with the values that it wants.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    file=$directory/scratch/sysctl/$(echo "${setting%=*}" | tr / _)
    echo "${setting#*=}" >"$file"
    mount --bind "$file" "$root/proc/sys/${setting%=*}"
done

mount -t sysfs sysfs "$root/sys"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
else
    mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
    for controller in cpu cpuacct cpuset memory devices freezer blkio pids; do
        mkdir "$root/sys/fs/cgroup/$controller"
        mount -t cgroup -o "$controller" cgroup "$root/sys/fs/cgroup/$controller"
    done
    mkdir "$root/sys/fs/cgroup/systemd"
    mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
fi
mount -t bpf bpf "$root/sys/fs/bpf"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root/run/lock" "$root/run/netns" "$root/var/lib/kubelet" "$root/var/lib/containerd" "$root/var/log/pods"
rm -rf "$root/var/run" "$root/etc/cni" "$root/opt/cni" "$root/var/lib/wharf" "$root/var/lib/wharf-kube" "$root/etc/wharf"
ln -s /run "$root/var/run"
mkdir -p "$root/etc/cni/net.d" "$root/opt/cni/bin"
mount --bind "$directory/kubelet" "$root/var/lib/kubelet"
mount --bind "$directory/containerd" "$root/var/lib/containerd"
for path; do
    mkdir -p "$root$path"
    mount --bind "$path" "$root$path"
done
echo "$name" >"$root/etc/hostname"
: >"$root/etc/resolv.conf"

cd "$root"
mkdir -p old
pivot_root . old
mount --make-rprivate /old
umount -l /old
rmdir /old
# Pods see the mounts that the runtime makes later (HostToContainer).
mount --make-rshared /
echo "$pid" >"$ready"
# Reaps the runtime's orphans.
while :; do
    sleep 1000 &
    wait
done
