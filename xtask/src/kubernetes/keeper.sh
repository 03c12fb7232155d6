# Keeps the mount and PID namespaces of a run. The kernel ends every process in them with the first one, which ends when
# this script's input does: also if `cargo xtask` is killed. Prints the process id of the first process.
# $1: name of the run's cgroups.
unshare --mount --pid --fork --propagation private sh -c '
    mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/netns || exit 1
    # /proc is still the machine'\''s.
    read -r pid rest </proc/self/stat
    echo "$pid"
    exec cat >/dev/null'
# A cgroup can be removed when the kernel has reaped its last process.
for attempt in 1 2 3 4 5 6 7 8 9 10; do
    left=
    for root in /sys/fs/cgroup /sys/fs/cgroup/*; do
        [ -d "$root/$1" ] || continue
        find "$root/$1" -depth -type d -exec rmdir {} \; 2>/dev/null
        [ -d "$root/$1" ] && left=yes
    done
    [ -n "$left" ] || exit 0
    sleep 0.2
done
echo "the cgroups $1 stay" >&2
exit 1
