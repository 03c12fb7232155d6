# Makes the router's network namespace with two subnets, and a namespace in a subnet for each argument NAME:SUBNET:HOST.
# Forwarding is a setting of the router's namespace alone.
set -e
ip netns add router
ip -n router link set lo up
ip netns exec router sh -c 'for family in ipv4 ipv6; do echo 1 >/proc/sys/net/$family/conf/all/forwarding; done'
for subnet in 0 1; do
    ip -n router link add "lan$subnet" type bridge
    ip -n router address add "172.3$subnet.0.1/24" dev "lan$subnet"
    ip -n router address add "fd3$subnet::1/64" dev "lan$subnet" nodad
    ip -n router link set "lan$subnet" up
done
for host; do
    name=${host%%:*} rest=${host#*:}
    subnet=${rest%%:*} number=${rest#*:}
    ip netns add "$name"
    ip -n "$name" link set lo up
    ip -n router link add "to-$number" type veth peer name eth0 netns "$name"
    ip -n router link set "to-$number" master "lan$subnet" up
    ip -n "$name" address add "172.3$subnet.0.$number/24" dev eth0
    ip -n "$name" address add "fd3$subnet::$number/64" dev eth0 nodad
    ip -n "$name" link set eth0 up
    ip -n "$name" route add default via "172.3$subnet.0.1"
    ip -n "$name" route add default via "fd3$subnet::1"
done
