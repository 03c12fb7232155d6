# With version 2, a cgroup that has controllers for its children has no processes: moves those of a node to `init`.
# $1: name of the run's cgroups; $2: name of the node.
place=/sys/fs/cgroup/$1/$2
[ -e "$place/cgroup.controllers" ] || exit 0
mkdir -p "$place/init"
while read -r pid; do echo "$pid" >"$place/init/cgroup.procs"; done <"$place/cgroup.procs"
sed 's/[a-z_][a-z_]*/+&/g' "$place/cgroup.controllers" >"$place/cgroup.subtree_control"
