//! Programs with the outcomes that were recorded on Linux 6.18, and moonring's where they differ on purpose.

/// A program, what the kernel makes of it, and what moonring does.
pub struct Named {
    pub name: &'static str,
    pub program: &'static str,
    /// With `SUBMIT_ALL`.
    pub kernel: &'static str,
    pub ours: Ours,
}

pub enum Ours {
    Same,
    /// A named deviation.
    Other(&'static str),
    /// The program uses what moonring does not have.
    Absent,
}

use Ours::{Absent, Other, Same};

const fn named(name: &'static str, program: &'static str, kernel: &'static str, ours: Ours) -> Named {
    Named { name, program, kernel, ours }
}

#[rustfmt::skip]
pub const NAMED: &[Named] = &[
    named("P01", "nop1 nop2=-5 nop3=7", "1:0 2:EIO 3:7", Same),
    named("P02", "nop1/L nop2=-5/L nop3/L nop4 nop5", "1:0 5:0 2:EIO 3:ECANCELED 4:ECANCELED", Same),
    // A positive result is no failure.
    named("P03", "nop1/L nop2=7/L nop3", "1:0 2:7 3:0", Same),
    named("P04", "nop1/H nop2=-5/H nop3/H nop4", "1:0 2:EIO 3:0 4:0", Same),
    named("P05", "nop1=-5/H nop2=-5/L nop3/H nop4", "1:EIO 2:EIO 3:ECANCELED 4:ECANCELED", Same),
    // A chain ends with its submit, which is refused in moonring.
    named("P06", "nop1=-5/L | nop2", "1:EIO | 2:0", Other(" | 1:EIO 2:ECANCELED")),
    named("P07", "nop1/L BAD2/L nop3 nop4", "1:ECANCELED 4:0 2:EINVAL 3:ECANCELED", Same),
    named("P08", "nop1/L BAD2 nop3", "1:ECANCELED 2:EINVAL 3:0", Same),
    named("P09", "nop1/H BAD2/H nop3 nop4", "1:ECANCELED 4:0 2:EINVAL 3:ECANCELED", Same),
    named("P10", "nop1 BAD2 nop3", "1:0 2:EINVAL 3:0", Same),
    named("P11", "nop1/L nop2/L nop3 nop11/L nop12 nop21", "1:0 11:0 21:0 2:0 12:0 3:0", Same),
    named("P12", "T1(3ms) nop2/D nop3 nop4", "1:ETIME 2:0 3:0 4:0", Same),
    named("P13", "T1(3ms) nop2/L nop3/DL nop4 nop5 nop6", "1:ETIME 2:0 3:0 4:0 5:0 6:0", Same),
    named("P14", "nop1 nop2=-5/DL nop3 nop4", "1:0 2:EIO 3:ECANCELED 4:0", Same),
    named("P15", "nop1/S nop2", "2:0", Same),
    named("P16", "nop1=-5/S nop2", "1:EIO 2:0", Same),
    named("P17", "nop1/LS nop2/LS nop3", "3:0", Same),
    named("P18", "nop1/LS nop2=-5/LS nop3/L nop4", "2:EIO", Same),
    named("P19", "nop1/LS nop2=-5/L nop3/LS nop4/S", "2:EIO 3:ECANCELED 4:ECANCELED", Same),
    named("P20", "nop1=-5/HS nop2/HS nop3", "1:EIO 3:0", Same),
    named("P21", "nop1/LS BAD2/L nop3 nop4", "1:ECANCELED 4:0", Other("1:ECANCELED 2:EINVAL 4:0")),
    named("P22", "nop1/S | nop2/D | nop3", " | 2:EOPNOTSUPP | 3:0", Other(" | 2:0 | 3:0")),
    named("P23", "T1(2ms)", "1:ETIME", Same),
    named("P24", "T1(2ms)/L nop2", "1:ETIME 2:ECANCELED", Same),
    named("P25", "T1(2ms,ok)/L nop2", "1:ETIME 2:0", Same),
    named("P26", "T1(2ms)/H nop2", "1:ETIME 2:0", Same),
    named("P27", "T1(2ms,multi=3)", "1:ETIME+MORE 1:ETIME+MORE 1:ETIME", Same),
    named("P28", "T1(inf,count=2) | nop2 | nop3", " | 2:0 | 3:0 1:0", Absent),
    // An entry earlier in the same submit counts.
    named("P29", "nop1 T2(inf,count=1)", "1:0 2:0", Absent),
    named("P30", "nop1/L LT2(inf)/L nop3", "1:0 2:ECANCELED 3:0", Same),
    named("P31", "T1(inf)/L LT2(2ms)/L nop3", "2:ETIME 1:ECANCELED 3:ECANCELED", Same),
    named("P32", "T1(inf)/H LT2(2ms)/H nop3", "2:ETIME 1:ECANCELED 3:0", Same),
    named("P33", "nop1/L LT2(inf)/S", "1:0", Same),
    named("P34", "LT1(inf) nop2", "1:EINVAL 2:0", Same),
    named("P35", "nop1/L LT2(inf)/L LT3(inf)", "1:ECANCELED 2:ECANCELED 3:EINVAL", Same),
    named("P36", "T1(inf) C2(1)", "2:0 1:ECANCELED", Same),
    named("P37", "C1(99) C2(99,all) C3(any)", "1:ENOENT 2:0 3:0", Same),
    named("P38", "T1(inf)/L nop2/L nop3 | C9(1)", " | 9:0 1:ECANCELED 2:ECANCELED 3:ECANCELED", Same),
    named("P39", "T1(inf)/H nop2 | C9(1)", " | 9:0 1:ECANCELED 2:0", Same),
    named("P40", "T1(inf)/L nop2/L nop3 | C9(2) | C10(1)",
        " | 9:ENOENT | 10:0 1:ECANCELED 2:ECANCELED 3:ECANCELED",
        Other(" | 9:0 | 10:0 1:ECANCELED 2:ECANCELED 3:ECANCELED")),
    named("P41", "T1(inf)/L LT2(inf) | C9(2) | C10(1)", " | 9:ENOENT | 10:0 1:ECANCELED 2:ECANCELED", Same),
    named("P42", "T1(inf) T1(inf) T2(inf) | C9(1) | C10(1,all) | C11(any)",
        " | 9:0 1:ECANCELED | 10:1 1:ECANCELED | 11:1 2:ECANCELED", Same),
    named("P43", "T1(inf)/L C2(1) | C9(1)", " | 9:0 1:ECANCELED 2:ECANCELED", Same),
    named("P44", "T1(inf)/S | C2(1)/S", " | 1:ECANCELED", Same),
    named("P45", "C1(99)/L nop2", "1:ENOENT 2:ECANCELED", Same),
    named("P46", "T1(40ms) nop2/D | C3(1) | nop4", "1:ETIME 2:0 | 3:ENOENT | 4:0", Same),
    named("P47", "T1(inf) TR2(1) TR3(1)", "2:0 3:ENOENT 1:ECANCELED", Same),
    // Once stands for any number of ticks. A Cancel that meets one finds nothing in the kernel, so they are rare here.
    named("P48", "T1(40ms,multi) | C2(1)", "1:ETIME+MORE | 2:0 1:ECANCELED", Same),
    named("P49", "nop1/A nop2/A nop3/A", "1:0 2:0 3:0", Absent),
    // What would start otherwise does not, and is counted when it is cancelled, not when its turn comes.
    named("a cancelled member behind a hard link", "T1(inf)/H nop2/L nop3 | C9(2) | C10(1)",
        " | 9:ENOENT | 10:0 1:ECANCELED 2:0 3:0", Other(" | 9:0 | 10:0 1:ECANCELED 2:ECANCELED 3:ECANCELED")),
    named("a cancelled chain", "T1(inf)/H nop2/H nop3 | C9(any)", " | 9:1 1:ECANCELED 2:0 3:0",
        Other(" | 9:3 1:ECANCELED 2:ECANCELED 3:ECANCELED")),
    named("a cancelled follower of the Cancel", "C1(2)/H nop2", "1:ENOENT 2:0", Other("1:0 2:ECANCELED")),
    named("a cancelled drain", "T1(inf) nop2/D nop3 | C4(2) | C5(1)", " |  | ",
        Other(" | 4:0 2:ECANCELED 3:0 | 5:0 1:ECANCELED")),
    // A twin: the kernel ends the older entry with the guarded one's user_data.
    named("LinkTimeout and a twin", "T7(inf) | T7(inf)/L LT8(2ms)/L nop9 | C10(any)",
        " | 8:ETIME 7:ECANCELED | 10:1 7:ECANCELED 9:ECANCELED",
        Other(" | 8:ETIME 7:ECANCELED 9:ECANCELED | 10:1 7:ECANCELED")),
    // The Cancel does not wait for the drain that waits for its target.
    named("Cancel behind a drain", "T1(60ms) nop2/D C3(1) nop4", "1:ETIME 2:0 3:ENOENT 4:0",
        Other("3:0 1:ECANCELED 2:0 4:0")),
    named("failed preparations and a drain", "T1(4ms) nop2/D nop3 BAD4/L nop5 BAD6",
        "4:EINVAL 6:EINVAL 5:ECANCELED 1:ETIME 2:0 3:0", Same),
    // What fails its preparation with a drain still holds up what follows, in the kernel.
    named("bad entries with skips", "LT1(inf)/S BAD2/S nop3/L BAD4/S", "1:EINVAL 2:EINVAL 3:ECANCELED 4:EINVAL", Same),
    named("a bad drain", "T1(inf) BAD2/D nop3 | nop4", "2:EINVAL | ", Other("2:EINVAL 3:0 | 4:0")),
    named("a bad drain in a chain", "T1(inf) nop2/L BAD3/DL nop4 nop5", "2:ECANCELED 3:EINVAL 4:ECANCELED",
        Other("2:ECANCELED 3:EINVAL 4:ECANCELED 5:0")),
    named("a bad chain behind a drain in a chain", "nop1/L nop2/D BAD3 T4(inf) nop5", "1:0 2:0 3:EINVAL 5:0",
        Other("1:0 2:0 3:EINVAL")),
    // The drain is over, but the kernel goes on as if it were not until nothing is running.
    named("after a drain", "nop1 nop2/D T3(inf) | nop4", "1:0 2:0 | ", Other("1:0 2:0 | 4:0")),
];
