// HCCL: collectives between processes of one machine, over POSIX shared memory, in stream order.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "stub.h"

using namespace dlo_stub;

namespace {

// Return codes of HCCL, as CANN numbers them.
constexpr int kHcclOk = 0, kHcclPara = 1, kHcclUnsupported = 5, kHcclTimeout = 9;
// What a stream says of a collective that gave up.
constexpr int kStreamTimeout = 507048;
constexpr uint32_t kMaxRanks = 16;
constexpr size_t kChunk = 1 << 20;

struct Header {
  std::atomic<uint32_t> arrived, phase;
};
struct Comm {
  uint32_t rank, size;
  std::string name;
  Header* head;
  char* slots;
  std::atomic<bool> gone{false};  // destroyed, maybe in the middle of a collective
  std::atomic<int> error{kHcclOk};

  char* slot(uint32_t r) const { return slots + r * kChunk; }

  // Wait for all ranks; false: a peer did not come, or the communicator was destroyed.
  bool meet() {
    uint32_t phase = head->phase.load();
    if (head->arrived.fetch_add(1) + 1 == size) {
      head->arrived.store(0);
      head->phase.store(phase + 1);
      return true;
    }
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(knob(Knob::hccl_timeout_s));
    while (head->phase.load() == phase) {
      if (gone) return false;
      if (std::chrono::steady_clock::now() > end) {
        trace("HcclTimeout rank=%u", rank);
        error = kHcclTimeout;
        return false;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }
};

// As documented for HcclAllGather: fp8 and hif8 only on Ascend 950, not on A2 and A3.
bool has_fp8() { return std::strstr(text_from_environment("DLO_STUB_SOC", ""), "950"); }
size_t item_size(int dtype) {
  switch (dtype) {
    case 0: case 7: return 1;                                      // int8 uint8
    case 14: case 15: case 16: case 17: return has_fp8() ? 1 : 0;  // hif8 fp8
    case 1: case 3: case 8: case 11: return 2;                     // int16 fp16 uint16 bf16
    case 2: case 4: case 9: return 4;                              // int32 fp32 uint32
    case 5: case 6: case 10: return 8;                             // int64 uint64 fp64
    default: return 0;
  }
}

int open_comm(uint32_t size, const char* name, uint32_t rank, void** out) {
  if (size > kMaxRanks || rank >= size) return kHcclPara;
  if (int code = fault("HcclCommInit")) return code;
  size_t bytes = 4096 + size * kChunk;
  int fd = shm_open(name, O_CREAT | O_RDWR, 0600);
  if (fd < 0) return kHcclPara;
  bool sized = !ftruncate(fd, static_cast<off_t>(bytes));
  void* p = sized ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
  close(fd);
  if (p == MAP_FAILED) return kHcclPara;
  auto* made = new Comm{rank, size, name, static_cast<Header*>(p), static_cast<char*>(p) + 4096};
  if (!made->meet()) return kHcclTimeout;
  if (rank == 0) shm_unlink(name);  // everybody has it mapped
  trace("CommInit rank=%u size=%u", rank, size);
  *out = made;
  return kHcclOk;
}

// Run `chunk(at, n)` for each piece; what a peer's absence does to a stream.
template <class Chunk>
int in_chunks(Comm* c, size_t bytes, Chunk chunk) {
  for (size_t at = 0; at < bytes; at += kChunk) {
    if (chunk(at, bytes - at < kChunk ? bytes - at : kChunk)) continue;
    // Given up on purpose: what is left in the buffer is nobody's any more, and no error.
    return c->gone ? kOk : kStreamTimeout;
  }
  return kOk;
}

}  // namespace

API int HcclGetRootInfo(char* info) {
  std::random_device random;
  std::memset(info, 0, 4108);
  std::snprintf(info, 128, "/dlo_hccl_%d_%08x%08x", getpid(), random(), random());
  return kHcclOk;
}
API int HcclCommInitRootInfo(uint32_t n, const char* info, uint32_t rank, void** comm) {
  return open_comm(n, info, rank, comm);
}
API int HcclCommInitRootInfoConfig(uint32_t n, const char* info, uint32_t rank, const void*,
                                   void** comm) {
  return open_comm(n, info, rank, comm);
}
API uint32_t HcclGetCommConfigCapability() { return 0; }
API int HcclSetConfig(int, int32_t) { return kHcclOk; }
API int HcclCommDestroy(void* comm) {
  auto* c = static_cast<Comm*>(comm);
  trace("CommDestroy rank=%u size=%u", c->rank, c->size);
  c->gone = true;  // never freed: a worker may stand inside
  return kHcclOk;
}
API int HcclGetCommAsyncError(void* comm, int* error) {
  *error = static_cast<Comm*>(comm)->error;
  return kHcclOk;
}
API int HcclGetCommName(void* comm, char* out) {
  std::strcpy(out, static_cast<Comm*>(comm)->name.c_str());
  return kHcclOk;
}

API int HcclAllGather(void* send, void* recv, uint64_t count, int dtype, void* comm, void* stream) {
  auto* c = static_cast<Comm*>(comm);
  size_t bytes = count * item_size(dtype);
  if (int code = fault("HcclAllGather")) return code;
  if (count && !bytes) return kHcclUnsupported;
  trace("HcclAllGather bytes=%zu dtype=%d stream=%d", bytes, dtype, stream_id(stream));
  submit(stream, [=] {
    return in_chunks(c, bytes, [=](size_t at, size_t n) {
      std::memcpy(c->slot(c->rank), static_cast<char*>(send) + at, n);
      if (!c->meet()) return false;
      for (uint32_t r = 0; r < c->size; ++r)
        std::memcpy(static_cast<char*>(recv) + r * bytes + at, c->slot(r), n);
      return c->meet();
    });
  });
  return kHcclOk;
}
API int HcclBroadcast(void* buffer, uint64_t count, int dtype, uint32_t root, void* comm,
                      void* stream) {
  auto* c = static_cast<Comm*>(comm);
  size_t bytes = count * item_size(dtype);
  if (count && !bytes) return kHcclUnsupported;
  trace("HcclBroadcast bytes=%zu stream=%d", bytes, stream_id(stream));
  submit(stream, [=] {
    return in_chunks(c, bytes, [=](size_t at, size_t n) {
      char* mine = static_cast<char*>(buffer) + at;
      if (c->rank == root) std::memcpy(c->slot(root), mine, n);
      if (!c->meet()) return false;
      if (c->rank != root) std::memcpy(mine, c->slot(root), n);
      return c->meet();
    });
  });
  return kHcclOk;
}
// The sum of int32, fp32 or int64; it stands for all of a user's own reductions.
API int HcclAllReduce(void* send, void* recv, uint64_t count, int dtype, int op, void* comm,
                      void* stream) {
  auto* c = static_cast<Comm*>(comm);
  size_t bytes = count * item_size(dtype);
  if (op != 0 || (dtype != 2 && dtype != 4 && dtype != 5)) return kHcclUnsupported;
  trace("HcclAllReduce bytes=%zu stream=%d", bytes, stream_id(stream));
  submit(stream, [=] {
    return in_chunks(c, bytes, [=](size_t at, size_t n) {
      std::memcpy(c->slot(c->rank), static_cast<char*>(send) + at, n);
      if (!c->meet()) return false;
      auto add = [&](auto* out) {
        std::memset(out, 0, n);
        for (uint32_t r = 0; r < c->size; ++r) {
          auto* in = reinterpret_cast<decltype(out)>(c->slot(r));
          for (size_t i = 0; i < n / sizeof *out; ++i) out[i] += in[i];
        }
      };
      char* out = static_cast<char*>(recv) + at;
      if (dtype == 2) add(reinterpret_cast<int32_t*>(out));
      if (dtype == 4) add(reinterpret_cast<float*>(out));
      if (dtype == 5) add(reinterpret_cast<int64_t*>(out));
      return c->meet();
    });
  });
  return kHcclOk;
}
