#!/bin/sh
# Process 1 of a test guest: runs each planned test as a process of its own, tells the host, and turns the machine off.
# On the second serial line, what starts with @ is told to xtask (xtask/src/vm/guest.rs reads it); | is a test's output.
/bin/busybox --install -s /bin
export PATH=/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
mount -t bpf bpf /sys/fs/bpf
ln -s /proc/self/fd /dev/fd
stty -F /dev/ttyS1 raw -echo
exec >/dev/ttyS1 2>&1
for module in $(cat /modules/order); do
    insmod "/modules/$module" || echo "@broken insmod $module"
done
ip link set lo up
hostname guest
export WHARF_BIN_DIR=/wharf/bin WHARF_BPF_DIR=/wharf/bpf INSTA_UPDATE=no
echo "@kernel $(uname -r)"

# What the agent finds here. It may refuse the kernel: then its log says why.
wharf-agent --run-dir /run/probe --state-dir /run/probe-state >/tmp/agent.log 2>&1 &
agent=$!
while kill -0 $agent 2>/dev/null; do
    wharf --socket /run/probe/wharf.sock status -o json >/tmp/status 2>/dev/null
    [ -s /tmp/status ] && break
    sleep 0.1
done
echo "@status $(tr -d '\n' </tmp/status)"
kill $agent 2>/dev/null
wait $agent || sed 's/^/@broken the agent: /' /tmp/agent.log

# In hundredths of a second.
now() { cut -d' ' -f1 /proc/uptime | tr -d .; }
# The next test of the plan, whose file the workers share as descriptor 3.
next() {
    until mkdir /tmp/taking 2>/dev/null; do sleep 0.01; done
    read -r file name <&3
    set -- $?
    rmdir /tmp/taking
    return "$1"
}
# A worker for each processor. A test is reported when it has ended, so that no two reports mix.
work() {
    while next; do
        begin=$(now)
        timeout -s KILL "$(cat /wharf/limit)" "/wharf/tests/$file" --exact "$name" --test-threads=1 >"/tmp/out$1" 2>&1 </dev/null 3<&-
        code=$?
        # A name that the binary does not know would succeed without a test.
        [ $code = 0 ] && ! grep -q '^test result: ok. 1 passed' "/tmp/out$1" && code=255
        until mkdir /tmp/report 2>/dev/null; do sleep 0.01; done
        echo "@start $file $name"
        [ $code = 0 ] || sed 's/^/|/' "/tmp/out$1"
        echo "@end $file $name $code $(($(now) - begin))"
        rmdir /tmp/report
    done
}
exec 3</plan
work 1 &
work 2 &
wait
exec 3</alone
work 1
dmesg | grep -E 'BUG:|WARNING:|Oops|general protection|rcu.*stall|hung task' | sed 's/^/@kernel-said /'
echo "@done"
poweroff -f
