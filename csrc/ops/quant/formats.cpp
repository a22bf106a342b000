// The formats of packed weights, and quant_rows(packed, rows, type, dtype): rows of packed weights as numbers, all of
// them or those of the given indices.
#include "formats.h"

#include "../../../kernels/quant/quant.h"
#include "rows.h"

namespace metalcore {

const QuantFormat& quant_format(const char* op, int64_t type) {
  static const QuantFormat formats[] = {
      {2, "Q4_0", 32, 18},    {3, "Q4_1", 32, 20},    {6, "Q5_0", 32, 22},    {7, "Q5_1", 32, 24},
      {8, "Q8_0", 32, 34},    {10, "Q2_K", 256, 84},  {11, "Q3_K", 256, 110}, {12, "Q4_K", 256, 144},
      {13, "Q5_K", 256, 176}, {14, "Q6_K", 256, 210}, {20, "IQ4_NL", 32, 18}, {23, "IQ4_XS", 256, 136},
      {39, "MXFP4", 32, 17},
  };
  for (const QuantFormat& format : formats)
    if (format.number == type) return format;
  throw std::runtime_error(std::string("metalcore::") + op + ": there are no kernels for GGML's type " +
                           std::to_string(type));
}

Tensor from_multiple_of_16(const Tensor& tensor) {
  const Tensor whole = as_contiguous(tensor);
  return reinterpret_cast<uintptr_t>(whole.data_ptr()) % 16 ? torch::stable::clone(whole) : whole;
}

PackedRows packed_rows(const char* op, const Tensor& packed, const QuantFormat& format, int64_t dims) {
  check(packed.scalar_type() == ScalarType::Byte, "metalcore::", op, ": packed must be uint8, not ",
        dtype_name(packed.scalar_type()));
  check(packed.dim() == dims, "metalcore::", op, ": packed must have ", dims, " dimensions, not ", packed.dim());
  const int64_t rows = packed.size(-2), row_bytes = packed.size(-1);
  check(row_bytes % format.bytes == 0, "metalcore::", op, ": rows of ", row_bytes, " bytes are not blocks of ",
        format.name, ", which have ", format.bytes);
  const int64_t length = row_bytes / format.bytes * format.block, matrices = dims == 3 ? packed.size(0) : 1;
  const Tensor tensor = from_multiple_of_16(packed);
  if (tensor.numel() % 4 == 0) return {tensor, matrices, rows, row_bytes, length};
  const int64_t padded = round_up<int64_t>(row_bytes, 4);  // kernels read words
  return {torch::stable::pad(tensor, {0, padded - row_bytes}), matrices, rows, padded, length};
}

uint32_t quant_dtype(ScalarType dtype) {
  return dtype == ScalarType::Float ? QUANT_FLOAT : dtype == ScalarType::Half ? QUANT_HALF : QUANT_BFLOAT;
}

Tensor quant_rows(const Tensor& packed, const MaybeTensor& rows, int64_t type, ScalarType dtype) {
  const QuantFormat& format = quant_format("quant_rows", type);
  const PackedRows weights = packed_rows("quant_rows", packed, format, 2);
  check_rows("quant_rows", rows, dtype, packed);
  const RowsReader reader{.kernel = std::string("quant_rows_") + format.name,
                          .format = format.name,
                          .packed = weights.tensor,
                          .rows = weights.rows,
                          .length = weights.length,
                          .row_bytes = static_cast<uint64_t>(weights.row_bytes),
                          .bind =
                              [&](gpu::Recording& recording) {
                                recording.buffer(0, weights.tensor);
                                return 1u;
                              },
                          .bytes = [&](int64_t count) { return static_cast<double>(count * weights.row_bytes); }};
  return rows_as_numbers("quant_rows", reader, rows, dtype);
}

}  // namespace metalcore

STABLE_TORCH_LIBRARY_FRAGMENT(metalcore, m) {
  m.def("quant_rows(Tensor packed, Tensor? rows, int type, ScalarType dtype) -> Tensor");
}

METALCORE_KERNELS(m) { m.impl<&metalcore::quant_rows>("quant_rows"); }
