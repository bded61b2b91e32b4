// Memory: device and host ranges, each tracked, and the copies between them.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "stub.h"

using namespace dlo_stub;

namespace {

enum class Kind { device, host, registered };
struct Range {
  size_t size;
  Kind kind;
  int device;
};
// Never destroyed: workers of streams outlive main().
struct State {
  std::mutex mutex;
  std::map<uintptr_t, Range> ranges;
  size_t used[64] = {};
};
State& state() {
  static State* made = new State;
  return *made;
}
size_t device_bytes() {
  static size_t n = static_cast<size_t>(number_from_environment("DLO_STUB_NPU_MEM_MB", 512)) << 20;
  return n;
}

size_t round_up(size_t n, size_t to) { return n ? (n + to - 1) / to * to : to; }

const Range* find(const void* p, size_t n) {  // with the mutex held
  auto address = reinterpret_cast<uintptr_t>(p);
  auto& ranges = state().ranges;
  auto it = ranges.upper_bound(address);
  if (it == ranges.begin()) return nullptr;
  --it;
  return address + n <= it->first + it->second.size ? &it->second : nullptr;
}

int allocate(void** out, size_t size, Kind kind, size_t unit, int fill) {
  size_t rounded = round_up(size, unit);
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  int device = device_or_first();
  if (kind == Kind::device && s.used[device] + rounded > device_bytes()) return kOutOfMemory;
  void* p = std::aligned_alloc(unit, rounded);
  if (!p) return kOutOfMemory;
  if (fill) std::memset(p, fill, rounded);
  if (kind == Kind::device) s.used[device] += rounded;
  s.ranges[reinterpret_cast<uintptr_t>(p)] = {rounded, kind, kind == Kind::device ? device : -1};
  *out = p;
  return kOk;
}

int give_back(void* p) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  auto it = s.ranges.find(reinterpret_cast<uintptr_t>(p));
  if (it == s.ranges.end()) return kInvalidParam;
  if (it->second.kind == Kind::device) s.used[it->second.device] -= it->second.size;
  std::memset(p, 0xDD, it->second.size);  // a use after free shows
  s.ranges.erase(it);
  std::free(p);
  return kOk;
}

int register_host(void* p, uint64_t n) {
  if (int code = fault("HostRegister")) return code;
  if (reinterpret_cast<uintptr_t>(p) % 4096) return 507899;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.ranges[reinterpret_cast<uintptr_t>(p)] = {n, Kind::registered, -1};
  trace("HostRegister size=%llu", static_cast<unsigned long long>(n));
  return kOk;
}

// Directions: 0 host to host, 1 host to device, 2 device to host, 3 device to device.
int check_direction(void* dst, const void* src, size_t n, int direction) {
  const char *to = kind_of(dst, n), *from = kind_of(src, n);
  bool to_device = !std::strcmp(to, "device"), from_device = !std::strcmp(from, "device");
  if (direction > 3) return kOk;
  if (to_device == (direction == 1 || direction == 3) &&
      from_device == (direction == 2 || direction == 3))
    return kOk;
  trace("BadCopy kind=%d dst=%s src=%s", direction, to, from);
  return kInvalidParam;
}

}  // namespace

const char* dlo_stub::kind_of(const void* p, size_t n) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const Range* r = find(p, n);
  if (!r) return "pageable";
  return r->kind == Kind::device ? "device" : r->kind == Kind::host ? "pinned" : "registered";
}
void dlo_stub::memory_info(int device, size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard<std::mutex> lock(state().mutex);
  *total_bytes = device_bytes();
  *free_bytes = device_bytes() - state().used[device];
}

API int aclrtMalloc(void** p, size_t n, int) {
  int code = fault("Malloc");
  // Device memory starts as garbage, never as zeros.
  if (!code) code = allocate(p, n, Kind::device, 512, 0xA5);
  trace("Malloc dev=%d size=%zu rc=%d", current_device(), n, code);
  return code;
}
API int aclrtMallocAlign32(void** p, size_t n, int policy) { return aclrtMalloc(p, n, policy); }
API int aclrtFree(void* p) {
  trace("Free");
  return give_back(p);
}
API int aclrtMallocHost(void** p, size_t n) {
  int code = fault("MallocHost");
  // Of what a machine can never have, nothing is tried.
  if (!code) code = n > (size_t{1} << 46) ? kOutOfMemory : allocate(p, n, Kind::host, 4096, 0);
  trace("MallocHost size=%zu rc=%d", n, code);
  return code;
}
API int aclrtFreeHost(void* p) {
  trace("FreeHost");
  return give_back(p);
}
API int aclrtHostRegister(void* p, uint64_t n, int, void** device) {
  if (device) *device = p;
  return register_host(p, n);
}
API int aclrtHostRegisterV2(void* p, uint64_t n, uint32_t) { return register_host(p, n); }
API int aclrtHostUnregister(void* p) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  trace("HostUnregister");
  return s.ranges.erase(reinterpret_cast<uintptr_t>(p)) ? kOk : kInvalidParam;
}
struct PtrAttributes {
  uint32_t id;
  int32_t type;
  uint32_t page_size;
  uint32_t reserved[4];
};
API int aclrtPointerGetAttributes(const void* p, PtrAttributes* a) {
  if (int code = fault("PointerGetAttributes")) return code;
  std::lock_guard<std::mutex> lock(state().mutex);
  const Range* r = find(p, 1);
  std::memset(a, 0, sizeof *a);
  a->type = !r ? 2 /* unregistered */ : r->kind == Kind::device ? 1 : 0;
  a->id = r && r->kind == Kind::device ? static_cast<uint32_t>(r->device) : 0;
  return kOk;
}

API int aclrtMemcpy(void* dst, size_t room, const void* src, size_t n, int direction) {
  if (n > room) return kInvalidParam;
  if (int code = fault("Memcpy")) return code;
  if (int code = check_direction(dst, src, n, direction)) return code;
  trace("Memcpy kind=%d size=%zu src=%s dst=%s", direction, n, kind_of(src, n), kind_of(dst, n));
  std::memcpy(dst, src, n);
  return kOk;
}
// As documented: with page-locked host memory the copy is asynchronous; with any other the call
// returns when the copy is done. Host to host is refused on A2 and A3.
API int aclrtMemcpyAsync(void* dst, size_t room, const void* src, size_t n, int direction,
                         void* stream) {
  if (n > room) return kInvalidParam;
  if (direction == 0) return kNotSupported;
  if (int code = fault("MemcpyAsync")) return code;
  if (int code = check_direction(dst, src, n, direction)) return code;
  const char *from = kind_of(src, n), *to = kind_of(dst, n);
  trace("MemcpyAsync kind=%d size=%zu stream=%d src=%s dst=%s", direction, n, stream_id(stream),
        from, to);
  long align = knob(Knob::align);
  if (align && (reinterpret_cast<uintptr_t>(dst) % static_cast<uintptr_t>(align) ||
                reinterpret_cast<uintptr_t>(src) % static_cast<uintptr_t>(align))) {
    trace("Misaligned");
    return kInvalidParam;
  }
  submit(stream, [=] {
    pause_us(Knob::copy_us);
    if (int code = fault("CopyOnDevice")) return code;
    std::memcpy(dst, src, n);
    return kOk;
  });
  if (!std::strcmp(from, "pageable") || !std::strcmp(to, "pageable")) return sync_stream(stream);
  return kOk;
}
API int aclrtMemset(void* p, size_t room, int32_t value, size_t n) {
  if (n > room) return kInvalidParam;
  std::memset(p, value, n);
  return kOk;
}
API int aclrtMemsetAsync(void* p, size_t room, int32_t value, size_t n, void* stream) {
  if (n > room) return kInvalidParam;
  trace("MemsetAsync size=%zu stream=%d", n, stream_id(stream));
  submit(stream, [=] {
    std::memset(p, value, n);
    return kOk;
  });
  return kOk;
}
