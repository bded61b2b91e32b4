// Devices: their number, versions and contexts; and the symbols that only have to be there.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

#include "stub.h"

using namespace dlo_stub;

namespace {
thread_local int current = -1;
}

int dlo_stub::device_count() {
  static int n = static_cast<int>(number_from_environment("DLO_STUB_NPU_COUNT", 2));
  return n;
}
int dlo_stub::current_device() { return current; }
void dlo_stub::set_current_device(int device) { current = device; }

API int aclInit(const char*) {
  trace("Init");
  return kOk;
}
API int aclFinalize() { return kOk; }
API const char* aclGetRecentErrMsg() { return ""; }
API const char* aclrtGetSocName() { return text_from_environment("DLO_STUB_SOC", "Ascend910B2"); }
API int aclrtGetDeviceCount(uint32_t* n) {
  *n = static_cast<uint32_t>(device_count());
  return kOk;
}
API int aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) return kInvalidParam;
  trace("SetDevice dev=%d", device);
  current = device;
  return kOk;
}
API int aclrtGetDevice(int32_t* device) {
  if (current < 0) return kContextNull;
  *device = current;
  return kOk;
}
API int aclrtResetDevice(int32_t device) {
  sync_device(device);
  return kOk;
}
API int aclrtGetCurrentContext(void** context) {
  if (current < 0) return kContextNull;
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(current) + 1);
  return kOk;
}
API int aclrtSetCurrentContext(void* context) {
  current = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return kOk;
}
API int aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return kOk;
}
API int aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return kOk;
}
API int aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return kOk;
}
API int aclrtGetMemInfo(int, size_t* free_bytes, size_t* total_bytes) {
  memory_info(device_or_first(), free_bytes, total_bytes);
  return kOk;
}
API int aclGetDeviceCapability(uint32_t, int, int64_t* value) {
  *value = 0;
  return kOk;
}
API int aclGetCannAttributeList(const int** list, size_t* n) {
  *list = nullptr;
  *n = 0;
  return kOk;
}
API int aclGetCannAttribute(int, int32_t* value) {
  *value = 0;
  return kOk;
}
API int aclsysGetVersionStr(char*, char* out) {
  std::strcpy(out, text_from_environment("DLO_STUB_CANN", "8.5.0"));
  return kOk;
}
API int aclsysGetCANNVersion(int package, char* out) {
  constexpr int kDriver = 7;
  std::memset(out, 0, 128);
  std::strncpy(out,
               package == kDriver ? text_from_environment("DLO_STUB_DRIVER", "25.5.0")
                                  : text_from_environment("DLO_STUB_CANN", "8.5.0"),
               127);
  return kOk;
}
API int aclrtGetStreamOverflowSwitch(void*, uint32_t* flag) {
  *flag = 0;
  return kOk;
}
API int aclrtGetSysParamOpt(int, int64_t* value) {
  *value = 0;
  return kOk;
}
API int aclmdlRICaptureGetInfo(void*, int* status, void** capture) {
  if (status) *status = 0;
  if (capture) *capture = nullptr;
  return kOk;
}
API size_t aclGetCompileoptSize(int) { return 16; }
API int aclGetCompileopt(int, char* value, size_t n) {  // "jit_compile": off, so aclnn is used
  std::snprintf(value, n, "disable");
  return kOk;
}
API uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
API uint64_t MsprofSysCycleTime() { return 0; }

// Accepted, and of no effect here.
#define NOTHING(name) \
  API int name() { return kOk; }
NOTHING(aclAppLog)
NOTHING(aclDestroyDataBuffer)
NOTHING(aclDestroyTensorDesc)
NOTHING(aclGetTensorDescDimV2)
NOTHING(aclGetTensorDescFormat)
NOTHING(aclGetTensorDescNumDims)
NOTHING(aclGetTensorDescType)
NOTHING(aclSetCompileopt)
NOTHING(aclSetTensorDescName)
NOTHING(aclSetTensorFormat)
NOTHING(aclSetTensorPlaceMent)
NOTHING(aclSetTensorShape)
NOTHING(aclmdlFinalizeDump)
NOTHING(aclmdlInitDump)
NOTHING(aclmdlRICaptureThreadExchangeMode)
NOTHING(aclmdlSetDump)
NOTHING(aclopDestroyAttr)
NOTHING(aclopSetAttrBool)
NOTHING(aclopSetAttrDataType)
NOTHING(aclopSetAttrFloat)
NOTHING(aclopSetAttrInt)
NOTHING(aclopSetAttrListBool)
NOTHING(aclopSetAttrListFloat)
NOTHING(aclopSetAttrListInt)
NOTHING(aclopSetAttrListListInt)
NOTHING(aclopSetAttrString)
NOTHING(aclrtCtxSetSysParamOpt)
NOTHING(aclrtDeviceEnablePeerAccess)
NOTHING(aclrtGetLastError)
NOTHING(aclrtPeekAtLastError)
NOTHING(aclrtSetDeviceSatMode)
NOTHING(aclrtSetOpExecuteTimeOut)
NOTHING(aclrtSetOpWaitTimeout)
NOTHING(aclrtSetStreamAttribute)
NOTHING(aclrtSetStreamFailureMode)
NOTHING(aclrtSetStreamOverflowSwitch)
NOTHING(aclrtSetSysParamOpt)
NOTHING(MsprofRegisterCallback)
NOTHING(MsprofReportAdditionalInfo)
NOTHING(MsprofReportApi)
NOTHING(MsprofReportCompactInfo)

#define TOKEN(name)     \
  API void* name() {    \
    static char token;  \
    return &token;      \
  }
TOKEN(aclCreateDataBuffer)
TOKEN(aclCreateTensorDesc)
TOKEN(aclopCreateAttr)

// Bound when torch_npu is loaded, and never called by what the tests do.
#define NOT_HERE(name)              \
  API int name() {                  \
    trace("Unsupported " #name);    \
    return kNotSupported;           \
  }
NOT_HERE(aclrtBinaryGetFunction)
NOT_HERE(aclrtBinaryLoadFromData)
NOT_HERE(aclrtFreePhysical)
NOT_HERE(aclrtGetFunctionAddr)
NOT_HERE(aclrtMallocPhysical)
NOT_HERE(aclrtMapMem)
NOT_HERE(aclrtMemExportToShareableHandle)
NOT_HERE(aclrtMemImportFromShareableHandle)
NOT_HERE(aclrtMemSetPidToShareableHandle)
NOT_HERE(aclrtReleaseMemAddress)
NOT_HERE(aclrtReserveMemAddress)
NOT_HERE(aclrtUnmapMem)
NOT_HERE(rtDevBinaryRegister)
NOT_HERE(rtFunctionRegister)
NOT_HERE(rtGetC2cCtrlAddr)
NOT_HERE(rtKernelLaunch)

// torch_npu runs operators on a queue of its own: an error code from here would come late, once,
// and leave garbage in later results. A test must not go on after that, so this stops loudly.
static int no_kernel(const char* op) {
  trace("Unsupported op %s", op);
  std::fprintf(stderr, "the CANN stand-in has no operator %s (operators.cpp)\n", op);
  std::abort();
}
API int aclopCompileAndExecute(const char* op) { return no_kernel(op); }
API int aclopCompileAndExecuteV2(const char* op) { return no_kernel(op); }
