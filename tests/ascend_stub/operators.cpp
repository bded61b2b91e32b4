// Operators: those aclnn operators that the tests and the demo need, by ATen's CPU kernels on the
// "device" memory, in stream order. What is not here stops the process with its name.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "stub.h"

namespace {

at::ScalarType dtype_of(int number) {
  switch (number) {
    case 0: return at::kFloat;
    case 1: return at::kHalf;
    case 2: return at::kChar;
    case 3: return at::kInt;
    case 4: return at::kByte;
    case 6: return at::kShort;
    case 7: return at::kUInt16;
    case 8: return at::kUInt32;
    case 9: return at::kLong;
    case 10: return at::kUInt64;
    case 11: return at::kDouble;
    case 12: return at::kBool;
    case 16: return at::kComplexFloat;
    case 17: return at::kComplexDouble;
    case 27: return at::kBFloat16;
    case 35: return at::kFloat8_e5m2;
    case 36: return at::kFloat8_e4m3fn;
    default: return at::ScalarType::Undefined;
  }
}

using T = at::Tensor*;
using S = at::Scalar*;
using Ints = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor*>;
using Plan = std::function<void()>;

at::Tensor value_of(T t) { return t ? *t : at::Tensor(); }

int plan(uint64_t* workspace, void** executor, Plan work) {
  *workspace = 0;
  *executor = new Plan(std::move(work));
  return 0;
}
int launch(const char* name, void* executor, void* stream) {
  auto* work = static_cast<Plan*>(executor);
  dlo_stub::trace("Op %s stream=%d", name, dlo_stub::stream_id(stream));
  dlo_stub::submit(stream, [work] {
    c10::NoGradGuard no_grad;
    // Bits depend on how kernels split their work; a worker is one thread.
    thread_local bool alone = (at::set_num_threads(1), true);
    (void)alone;
    dlo_stub::pause_us(dlo_stub::Knob::op_us);
    (*work)();
    delete work;
    return 0;
  });
  return 0;
}

}  // namespace

// ---------------------------------------------------------------- descriptors
API void* aclCreateTensor(const int64_t* dims, uint64_t n, int dtype, const int64_t* strides,
                          int64_t offset, int, const int64_t*, uint64_t, void* data) {
  auto type = dtype_of(dtype);
  if (type == at::ScalarType::Undefined) {
    std::fprintf(stderr, "the CANN stand-in has no dtype %d (operators.cpp)\n", dtype);
    std::abort();
  }
  // Called in the caller's mode; the work is done in the worker's.
  c10::InferenceMode off(false);
  char* p = static_cast<char*>(data) + offset * static_cast<int64_t>(c10::elementSize(type));
  return new at::Tensor(at::from_blob(p, at::IntArrayRef(dims, n), at::IntArrayRef(strides, n),
                                      at::TensorOptions().dtype(type)));
}
API int aclDestroyTensor(void* t) {
  delete static_cast<at::Tensor*>(t);
  return 0;
}
API void* aclCreateScalar(void* v, int dtype) {
  switch (dtype_of(dtype)) {
    case at::kFloat: return new at::Scalar(*static_cast<float*>(v));
    case at::kDouble: return new at::Scalar(*static_cast<double*>(v));
    case at::kInt: return new at::Scalar(*static_cast<int32_t*>(v));
    case at::kLong: return new at::Scalar(*static_cast<int64_t*>(v));
    case at::kBool: return new at::Scalar(*static_cast<bool*>(v));
    case at::kHalf: return new at::Scalar(*static_cast<at::Half*>(v));
    case at::kBFloat16: return new at::Scalar(*static_cast<at::BFloat16*>(v));
    default: return nullptr;
  }
}
API int aclDestroyScalar(void* s) {
  delete static_cast<at::Scalar*>(s);
  return 0;
}
API void* aclCreateIntArray(const int64_t* v, uint64_t n) { return new Ints(v, v + n); }
API int aclDestroyIntArray(void* a) {
  delete static_cast<Ints*>(a);
  return 0;
}
API void* aclCreateTensorList(void* const* v, uint64_t n) {
  auto* list = new Tensors;
  for (uint64_t i = 0; i < n; ++i) list->push_back(static_cast<at::Tensor*>(v[i]));
  return list;
}
API int aclDestroyTensorList(void* l) {
  for (auto* t : *static_cast<Tensors*>(l)) delete t;
  delete static_cast<Tensors*>(l);
  return 0;
}

// ---------------------------------------------------------------- operators
// OP(name, (parameters), copies, work): aclnn<name>GetWorkspaceSize plans, aclnn<name> launches. The
// plan takes handles by value, since the descriptors go away before the stream gets there.
#define ARGS(...) __VA_ARGS__
#define OP(name, params, copies, work)                                                 \
  API int aclnn##name##GetWorkspaceSize(ARGS params, uint64_t* workspace, void** ex) { \
    copies;                                                                            \
    return plan(workspace, ex, [=]() mutable { work; });                               \
  }                                                                                    \
  API int aclnn##name(void*, uint64_t, void* ex, void* stream) {                       \
    return launch("aclnn" #name, ex, stream);                                          \
  }
#define UNARY(name, f) \
  OP(name, (T a, T out), at::Tensor x = *a; at::Tensor o = *out, o.copy_(f))
#define BINARY(name, f)                                                                           \
  OP(name, (T a, T b, T out), at::Tensor x = *a; at::Tensor y = *b; at::Tensor o = *out, o.copy_(f))
#define WITH_SCALAR(name, f)                                                                      \
  OP(name, (T a, S b, T out), at::Tensor x = *a; at::Scalar y = *b; at::Tensor o = *out, o.copy_(f))
#define IN_PLACE(name, f) OP(name, (T a, T b), at::Tensor x = *a; at::Tensor y = *b, f)
#define IN_PLACE_SCALAR(name, f) OP(name, (T a, S b), at::Tensor x = *a; at::Scalar y = *b, f)
#define REDUCTION(name, f)                                                                      \
  OP(name, (T a, Ints * dims, bool keep, T out), at::Tensor x = *a; Ints d = *dims; (void)keep; \
     at::Tensor o = *out, o.copy_((f).view(o.sizes())))
#define TYPED_REDUCTION(name, f)                                                      \
  OP(name, (T a, Ints * dims, bool keep, int, T out), at::Tensor x = *a; Ints d = *dims; \
     (void)keep; at::Tensor o = *out, o.copy_((f).view(o.sizes())))

// Filling and copying.
IN_PLACE(InplaceCopy, x.copy_(y))
OP(InplaceZero, (T a), at::Tensor x = *a, x.zero_())
OP(InplaceOne, (T a), at::Tensor x = *a, x.fill_(1))
IN_PLACE_SCALAR(InplaceFillScalar, x.fill_(y))
OP(InplaceMaskedFillScalar, (T a, T b, S c), at::Tensor x = *a; at::Tensor y = *b;
   at::Scalar z = *c, x.masked_fill_(y, z))
OP(InplaceMaskedFillTensor, (T a, T b, T c), at::Tensor x = *a; at::Tensor y = *b;
   at::Tensor z = *c, x.masked_fill_(y, z))
OP(Cast, (T a, int, T out), at::Tensor x = *a; at::Tensor o = *out, o.copy_(x))
OP(Arange, (S a, S b, S c, T out), at::Scalar x = *a; at::Scalar y = *b; at::Scalar z = *c;
   at::Tensor o = *out, o.copy_(at::arange(x, y, z, o.options()).slice(0, 0, o.numel())))
OP(Cat, (Tensors * list, int64_t dim, T out), std::vector<at::Tensor> xs;
   for (auto* t : *list) xs.push_back(*t); at::Tensor o = *out, o.copy_(at::cat(xs, dim)))
OP(Stack, (Tensors * list, int64_t dim, T out), std::vector<at::Tensor> xs;
   for (auto* t : *list) xs.push_back(*t); at::Tensor o = *out, o.copy_(at::stack(xs, dim)))
OP(Embedding, (T a, T b, T out), at::Tensor x = *a; at::Tensor y = *b; at::Tensor o = *out,
   o.copy_(at::embedding(x, y)))

// Arithmetic.
OP(Add, (T a, T b, S alpha, T out), at::Tensor x = *a; at::Tensor y = *b; at::Tensor o = *out;
   at::Scalar k = *alpha, o.copy_(at::add(x, y, k)))
OP(Adds, (T a, S b, S alpha, T out), at::Tensor x = *a; at::Scalar y = *b; at::Tensor o = *out;
   at::Scalar k = *alpha, o.copy_(at::add(x, y, k)))
OP(InplaceAdd, (T a, T b, S alpha), at::Tensor x = *a; at::Tensor y = *b; at::Scalar k = *alpha,
   x.add_(y, k))
OP(InplaceAdds, (T a, S b, S alpha), at::Tensor x = *a; at::Scalar y = *b; at::Scalar k = *alpha,
   x.add_(y, k))
OP(Sub, (T a, T b, S alpha, T out), at::Tensor x = *a; at::Tensor y = *b; at::Tensor o = *out;
   at::Scalar k = *alpha, o.copy_(at::sub(x, y, k)))
OP(Subs, (T a, S b, S alpha, T out), at::Tensor x = *a; at::Scalar y = *b; at::Tensor o = *out;
   at::Scalar k = *alpha, o.copy_(at::sub(x, y, k)))
BINARY(Mul, at::mul(x, y))
WITH_SCALAR(Muls, at::mul(x, y))
IN_PLACE(InplaceMul, x.mul_(y))
IN_PLACE_SCALAR(InplaceMuls, x.mul_(y))
BINARY(Div, at::div(x, y))
WITH_SCALAR(Divs, at::div(x, y))
IN_PLACE(InplaceDiv, x.div_(y))
IN_PLACE_SCALAR(InplaceDivs, x.div_(y))
WITH_SCALAR(PowTensorScalar, at::pow(x, y))
WITH_SCALAR(BitwiseXorScalar, at::bitwise_xor(x, y))
IN_PLACE_SCALAR(InplaceBitwiseXorScalar, x.bitwise_xor_(y))

// Functions of one number.
UNARY(Relu, at::relu(x))
UNARY(Silu, at::silu(x))
UNARY(Gelu, at::gelu(x))
OP(GeluV2, (T a, int64_t mode, T out), at::Tensor x = *a; at::Tensor o = *out,
   o.copy_(at::gelu(x, mode == 1 ? "tanh" : "none")))
UNARY(Sin, at::sin(x))
UNARY(Cos, at::cos(x))
UNARY(Exp, at::exp(x))
UNARY(Neg, at::neg(x))
UNARY(Sqrt, at::sqrt(x))
UNARY(Rsqrt, at::rsqrt(x))
UNARY(Tanh, at::tanh(x))
UNARY(Abs, at::abs(x))
OP(Softmax, (T a, int64_t dim, T out), at::Tensor x = *a; at::Tensor o = *out,
   o.copy_(at::softmax(x, dim)))

// Comparisons and logic.
BINARY(EqTensor, at::eq(x, y))
WITH_SCALAR(EqScalar, at::eq(x, y))
BINARY(NeTensor, at::ne(x, y))
WITH_SCALAR(NeScalar, at::ne(x, y))
WITH_SCALAR(GtScalar, at::gt(x, y))
WITH_SCALAR(LtScalar, at::lt(x, y))
BINARY(Equal, at::scalar_tensor(at::equal(x, y)).to(at::kBool))
BINARY(LogicalOr, at::logical_or(x, y))
IN_PLACE(InplaceLogicalOr, x.logical_or_(y))
UNARY(LogicalNot, at::logical_not(x))
UNARY(IsFinite, at::isfinite(x))

// Reductions.
REDUCTION(Any, d.empty() ? at::any(x) : at::any(x, d, keep))
REDUCTION(All, d.empty() ? at::all(x) : at::all(x, d, keep))
TYPED_REDUCTION(Mean, d.empty() ? at::mean(x) : at::mean(x, d, keep))
TYPED_REDUCTION(ReduceSum, d.empty() ? at::sum(x) : at::sum(x, d, keep))

// Products of matrices.
OP(Matmul, (T a, T b, T out, int8_t), at::Tensor x = *a; at::Tensor y = *b; at::Tensor o = *out,
   o.copy_(at::matmul(x, y)))
OP(Mm, (T a, T b, T out, int8_t), at::Tensor x = *a; at::Tensor y = *b; at::Tensor o = *out,
   o.copy_(at::matmul(x, y)))
OP(BatchMatMul, (T a, T b, T out, int8_t), at::Tensor x = *a; at::Tensor y = *b;
   at::Tensor o = *out, o.copy_(at::matmul(x, y)))
OP(Addmm, (T c, T a, T b, S beta, S alpha, T out, int8_t), at::Tensor z = *c; at::Tensor x = *a;
   at::Tensor y = *b; at::Tensor o = *out; at::Scalar p = *beta; at::Scalar q = *alpha,
   o.copy_(at::addmm(z, x, y, p, q)))

OP(LayerNorm, (T a, Ints * shape, T w, T b, double eps, T out, T mean, T rstd), at::Tensor x = *a;
   Ints n = *shape; at::Tensor gw = value_of(w); at::Tensor gb = value_of(b); at::Tensor o = *out;
   at::Tensor m = value_of(mean); at::Tensor r = value_of(rstd),
   auto result = at::native_layer_norm(x, n, gw, gb, eps); o.copy_(std::get<0>(result));
   if (m.defined()) m.copy_(std::get<1>(result).view(m.sizes()));
   if (r.defined()) r.copy_(std::get<2>(result).view(r.sizes())))

// Attention, as scaled_dot_product_attention asks for it: heads before tokens, no mask.
OP(FlashAttentionScore,
   (T q, T k, T v, T shift, T drop, T padding, T mask, Ints * prefix, double scale, double keep,
    int64_t before, int64_t after, int64_t heads, char* layout, int64_t precise, int64_t sparse,
    T max_out, T sum_out, T softmax_out, T out),
   bool prefixed = prefix && !prefix->empty();
   if (std::strcmp(layout, "BNSD") || shift || drop || padding || mask || prefixed || sparse) {
     std::fprintf(stderr, "the CANN stand-in has plain BNSD attention only (operators.cpp)\n");
     std::abort();
   } at::Tensor x = *q; at::Tensor y = *k; at::Tensor z = *v; at::Tensor o = *out,
   o.copy_(at::scaled_dot_product_attention(x, y, z, {}, 0.0, false, scale)))
