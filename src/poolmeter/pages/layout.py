"""Layout of the grant, meter and board pages. Generated from poolmeter_abi.h by poolmeter.pages.generate: do not edit."""

import ctypes

ABI_MAJOR = 1
ABI_MINOR = 1
GRANT_MAGIC = 0x544E415247504D50
METER_MAGIC = 0x524554454D504D50
BOARD_MAGIC = 0x4452414F42504D50
UNLIMITED = 0xFFFFFFFFFFFFFFFF
MAX_DEVICES = 64
MAX_SLOTS = 256
BOARD_SEATS = 500
LEFT = 32
ID_BYTES = 64
UUID_BYTES = 48
MEMORY_UNIT = 512
ON_FAULT_RUN = 0
ON_FAULT_REFUSE = 1
MEMORY_DEVICE = 0
MEMORY_POOL = 1
MEMORY_MANAGED = 2
MEMORY_VMM = 3
MEMORY_ARRAY = 4
MEMORY_MODULE = 5
MEMORY_GRAPH = 6
MEMORY_OVERHEAD = 7
MEMORY_KINDS = 8
SLOT_FREE = 0
SLOT_CLAIMED = 1
SLOT_LIVE = 2
SLOT_DEAD = 3
METER_HOLES = 1
LOCK_SLOTS = 0x10000000000
LOCK_FOLD = 0x10000010000


class GrantDevice(ctypes.LittleEndianStructure):
    _fields_ = (
        ("uuid", ctypes.c_char * 48),
        ("limit_ppm", ctypes.c_uint64),
        ("memory_limit", ctypes.c_uint64),
        ("weight", ctypes.c_uint32),
        ("soft", ctypes.c_uint32),
        ("show_memory", ctypes.c_uint32),
        ("mask_nvml", ctypes.c_uint32),
        ("device_index", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("device_memory", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 20),
    )


class Grant(ctypes.LittleEndianStructure):
    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("abi_major", ctypes.c_uint32),
        ("abi_minor", ctypes.c_uint32),
        ("header_size", ctypes.c_uint32),
        ("entry_size", ctypes.c_uint32),
        ("total_size", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
        ("device_count", ctypes.c_uint32),
        ("device_capacity", ctypes.c_uint32),
        ("on_fault", ctypes.c_uint32),
        ("suspended", ctypes.c_uint32),
        ("soft", ctypes.c_uint32),
        ("weight", ctypes.c_uint32),
        ("charge_copies", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("created_ns", ctypes.c_uint64),
        ("updated_ns", ctypes.c_uint64),
        ("allocation_id", ctypes.c_char * 64),
        ("decision_id", ctypes.c_char * 64),
        ("reserved", ctypes.c_uint64 * 37),
        ("devices", GrantDevice * 64),
    )


class Counters(ctypes.LittleEndianStructure):
    _fields_ = (
        ("launches", ctypes.c_uint64),
        ("graph_launches", ctypes.c_uint64),
        ("busy_ns", ctypes.c_uint64),
        ("throttled_ns", ctypes.c_uint64),
        ("throttle_waits", ctypes.c_uint64),
        ("timed_samples", ctypes.c_uint64),
        ("burst_samples", ctypes.c_uint64),
        ("dropped_samples", ctypes.c_uint64),
        ("copies", ctypes.c_uint64),
        ("copy_h2d_bytes", ctypes.c_uint64),
        ("copy_d2h_bytes", ctypes.c_uint64),
        ("copy_d2d_bytes", ctypes.c_uint64),
        ("copy_p2p_bytes", ctypes.c_uint64),
        ("denied_limit", ctypes.c_uint64),
        ("denied_limit_bytes", ctypes.c_uint64),
        ("denied_card", ctypes.c_uint64),
        ("denied_card_bytes", ctypes.c_uint64),
        ("internal_faults", ctypes.c_uint64),
        ("last_activity_ns", ctypes.c_uint64),
        ("memory_peak", ctypes.c_uint64),
        ("memory", ctypes.c_uint64 * 8),
        ("pending_ns", ctypes.c_uint64),
        ("copy_busy_ns", ctypes.c_uint64),
        ("denied_device", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 33),
    )


class Bucket(ctypes.LittleEndianStructure):
    _fields_ = (
        ("balance_ns", ctypes.c_int64),
        ("last_refill_ns", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
        ("limit_ppm", ctypes.c_uint64),
        ("charged_ns", ctypes.c_uint64),
        ("refilled_ns", ctypes.c_uint64),
        ("in_burst", ctypes.c_uint32),
        ("waiters", ctypes.c_uint32),
        ("burst_until_ns", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 8),
    )


class MeterDevice(ctypes.LittleEndianStructure):
    _fields_ = (
        ("uuid", ctypes.c_char * 48),
        ("flags", ctypes.c_uint32),
        ("spare", ctypes.c_uint32),
        ("reserved0", ctypes.c_uint64),
        ("bucket", Bucket),
        ("memory_word", ctypes.c_uint64),
        ("memory_peak", ctypes.c_uint64),
        ("reserved1", ctypes.c_uint64 * 6),
        ("retired", Counters * 2),
        ("reserved2", ctypes.c_uint64 * 96),
    )


class Slot(ctypes.LittleEndianStructure):
    _fields_ = (
        ("state", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("generation", ctypes.c_uint64),
        ("pid_namespace", ctypes.c_uint64),
        ("start_time_ticks", ctypes.c_uint64),
        ("attached_ns", ctypes.c_uint64),
        ("comm", ctypes.c_char * 16),
        ("uid", ctypes.c_uint32),
        ("spare", ctypes.c_uint32),
        ("intent", ctypes.c_uint64),
        ("intent_sequence", ctypes.c_uint64),
        ("intent_value", ctypes.c_uint64),
        ("confirmed", ctypes.c_uint64),
        ("on_behalf_allocation", ctypes.c_char * 64),
        ("on_behalf_node", ctypes.c_char * 64),
        ("on_behalf_bytes_in", ctypes.c_uint64),
        ("on_behalf_bytes_out", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 34),
    )


class Left(ctypes.LittleEndianStructure):
    _fields_ = (
        ("pid_namespace", ctypes.c_uint64),
        ("start_time_ticks", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("spare", ctypes.c_uint32),
    )


class Meter(ctypes.LittleEndianStructure):
    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("abi_major", ctypes.c_uint32),
        ("abi_minor", ctypes.c_uint32),
        ("header_size", ctypes.c_uint32),
        ("device_size", ctypes.c_uint32),
        ("slot_size", ctypes.c_uint32),
        ("slot_header_size", ctypes.c_uint32),
        ("counters_size", ctypes.c_uint32),
        ("device_count", ctypes.c_uint32),
        ("device_capacity", ctypes.c_uint32),
        ("slot_count", ctypes.c_uint32),
        ("devices_offset", ctypes.c_uint64),
        ("slots_offset", ctypes.c_uint64),
        ("total_size", ctypes.c_uint64),
        ("created_ns", ctypes.c_uint64),
        ("fold", ctypes.c_uint64),
        ("faults", ctypes.c_uint64),
        ("slots_used", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("allocation_id", ctypes.c_char * 64),
        ("left_count", ctypes.c_uint64),
        ("left", Left * 32),
        ("reserved", ctypes.c_uint64 * 394),
    )


class BoardSeat(ctypes.LittleEndianStructure):
    _fields_ = (
        ("owner", ctypes.c_uint64),
        ("busy_until_ns", ctypes.c_uint64),
        ("weight", ctypes.c_uint32),
        ("soft", ctypes.c_uint32),
        ("active_ns", ctypes.c_uint64),
        ("active_since_ns", ctypes.c_uint64),
        ("taken_ns", ctypes.c_uint64),
        ("limit_ppm", ctypes.c_uint64),
        ("starved_until_ns", ctypes.c_uint64),
    )


class Board(ctypes.LittleEndianStructure):
    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("abi_major", ctypes.c_uint32),
        ("abi_minor", ctypes.c_uint32),
        ("total_size", ctypes.c_uint64),
        ("seat_count", ctypes.c_uint32),
        ("spare", ctypes.c_uint32),
        ("uuid", ctypes.c_char * 48),
        ("slice_ns", ctypes.c_uint64),
        ("turn_ns", ctypes.c_uint64),
        ("changes", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 51),
        ("seats", BoardSeat * 500),
    )


STRUCTURES: dict[str, type[ctypes.LittleEndianStructure]] = {
    "pm_grant_device": GrantDevice,
    "pm_grant": Grant,
    "pm_counters": Counters,
    "pm_bucket": Bucket,
    "pm_meter_device": MeterDevice,
    "pm_slot": Slot,
    "pm_left": Left,
    "pm_meter": Meter,
    "pm_board_seat": BoardSeat,
    "pm_board": Board,
}
