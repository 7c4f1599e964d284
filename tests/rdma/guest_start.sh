# Inside an emulated machine, on the host's root: a Soft-RoCE device over the virtual Ethernet and one that is alone, then the command.
# Its exit status goes to the host through /run/result; the machine ends with it, or LIMIT seconds after it was started.
. /run/job/settings
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root TMPDIR=/run/tmp
ulimit -l unlimited
ulimit -n 65536
hostname "kvrouter-machine-$NODE"
chmod 1777 /run/tmp

end() {
  echo "$1" > /run/result/status
  sync
  echo b > /proc/sysrq-trigger
}
(sleep "$LIMIT"; end 124) &

# Every driver that is listed is loaded by whoever looks for a device: leave the one that there is.
find /etc/libibverbs.d -name '*.driver' ! -name rxe.driver -delete

ip link set lo up
for place in 0 1; do
  ip link set "eth$place" mtu 4200 up # room for RoCE's largest path MTU, 4096
  ip addr add "10.$((77 + place)).0.$((NODE + 1))/24" dev "eth$place"
  rdma link add "rxe$place" type rxe netdev "eth$place" || end 125
done

cd "$FOLDER" || end 125
sh /run/job/command.sh > "$(ls /dev/vport*p1)" 2>&1 < /dev/null
end $?
