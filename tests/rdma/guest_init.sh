#!/bin/busybox sh
# The first program of an emulated machine: the host's root, which stays read-only, under an overlay in memory, and over
# the host's root the packages that only the machine needs. Then guest_start.sh, from there.
/bin/busybox mkdir -p /proc /sys /dev /host /packages /memory /merged
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module"; done < /modules/order

mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose root /host || exec reboot -f
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose packages /packages || exec reboot -f
mount -t tmpfs -o mode=755 memory /memory
mkdir /memory/upper /memory/work
mount -t overlay -o "lowerdir=/packages:/host,upperdir=/memory/upper,workdir=/memory/work" overlay /merged || exec reboot -f

mkdir -p /merged/proc /merged/sys /merged/dev /merged/run /merged/tmp
mount --move /proc /merged/proc
mount --move /sys /merged/sys
mount --move /dev /merged/dev
mount -t tmpfs -o mode=755 run /merged/run
mkdir -p /merged/dev/shm /merged/dev/pts /merged/run/result /merged/run/job /merged/run/tmp
mount -t tmpfs -o mode=1777 shm /merged/dev/shm
mount -t devpts pts /merged/dev/pts
mount -t 9p -o rw,trans=virtio,version=9p2000.L,msize=131072 result /merged/run/result
cp /job/* /merged/run/job/
exec chroot /merged /bin/sh /run/job/start.sh
