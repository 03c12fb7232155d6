//! The endpoint's programs, packet by packet, attached to nothing: `BPF_PROG_TEST_RUN` on the very object that ships.
//!
//! Each case names a packet, the hook it meets, and all that may come of it: the verdict, the bytes that leave, and the
//! **exact** change of every counter of every endpoint concerned. What the kernel's test run cannot make (packets that
//! arrive somewhere, VLAN tags that the kernel took off the frame, packets in several pieces) is in `live`, on veth
//! pairs. The test runs name an interface, as traffic has one: the programs do not count what comes on the loopback
//! interface, see `test_packets`.

mod clients;
mod deliver;
mod established;
mod events;
mod fixture;
mod flows;
mod from_container;
mod headers;
mod hostile;
mod limits;
mod live;
mod neighbours;
mod policy;
mod recent;
mod shortcut;
mod size;
mod sources;
mod stack;
mod test_packets;
mod to_container;
