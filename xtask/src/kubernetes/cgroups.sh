# Moves this process to the cgroups of a node, below those of the run, and executes the rest of the command line.
# $1: name of the run's cgroups; $2: name of the node.
run=$1 node=$2
shift 2
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    place=/sys/fs/cgroup/$run/$node
    mkdir -p "$place"
    for parent in /sys/fs/cgroup "/sys/fs/cgroup/$run"; do
        sed 's/[a-z_][a-z_]*/+&/g' "$parent/cgroup.controllers" >"$parent/cgroup.subtree_control"
    done
    # settle.sh makes `init`.
    [ -d "$place/init" ] && place=$place/init
    echo 0 >"$place/cgroup.procs"
else
    for root in /sys/fs/cgroup/*; do
        [ -d "$root" ] && [ -e "$root/tasks" ] || continue
        mkdir -p "$root/$run/$node"
        if [ -e "$root/cpuset.cpus" ]; then
            for part in "$run" "$run/$node"; do
                [ -s "$root/$part/cpuset.cpus" ] && grep -q . "$root/$part/cpuset.cpus" && continue
                for file in cpuset.cpus cpuset.mems; do cat "$root/$file" >"$root/$part/$file"; done
            done
        fi
        echo 0 >"$root/$run/$node/cgroup.procs"
    done
fi
exec "$@"
