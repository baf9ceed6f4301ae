# PID 1 of the cluster, in namespaces of its own: the network between nodes, munged, slurmctld.
# control.sh FOLDER CONTROL_IP [NODE=IP]...
set -e
folder=$1 ip=$2
shift 2
hostname control
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs tmpfs /run     # `ip netns` keeps its names here
ip link set lo up
ip link add bridge type bridge
ip address add "$ip/24" dev bridge
ip link set bridge up
for node in "$@"; do
    name=${node%%=*}
    ip netns add "$name"
    ip link add "$name" type veth peer name eth0 netns "$name"
    ip link set "$name" master bridge up
    ip -n "$name" address add "${node#*=}/24" dev eth0
    ip -n "$name" link set lo up
    ip -n "$name" link set eth0 up
done
munge=$folder/munge
munged --foreground --socket="$munge/socket" --key-file="$munge/key" --log-file="$munge/log" \
    --pid-file="$munge/pid" --seed-file="$munge/seed" &
until [ -S "$munge/socket" ]; do sleep 0.05; done
slurmctld -D &
touch "$folder/network-is-up"
while :; do wait -n || sleep 0.2; done    # PID 1 reaps what its children leave
