"""The out= forms of PyTorch's operators that were seen to write their result, and nothing else.

Only they may be given a place in memory that others share. PyTorch's binary_cross_entropy on the CPU, for example,
writes the losses of all elements through the one number that it is given. `python tests/programs/out_forms.py --write`
finds them by guard words around a place, over the samples of PyTorch's own tests.
"""

__all__ = ["SEEN"]

SEEN = frozenset(
    """
    _fft_c2c.out _fft_c2r.out _fft_r2c.out _linalg_det.result _linalg_eigh.eigenvalues _linalg_slogdet.sign
    _linalg_solve_ex.result _linalg_svd.U _log_softmax.out _log_softmax_backward_data.out
    _native_batch_norm_legit.no_stats_out _softmax.out _softmax_backward_data.out _upsample_bilinear2d_aa.out
    _upsample_bilinear2d_aa_backward.grad_input _upsample_nearest_exact1d.out
    _upsample_nearest_exact1d_backward.grad_input _upsample_nearest_exact2d.out
    _upsample_nearest_exact2d_backward.grad_input _upsample_nearest_exact3d.out
    _upsample_nearest_exact3d_backward.grad_input abs.out acos.out acosh.out adaptive_max_pool2d.out
    adaptive_max_pool2d_backward.grad_input adaptive_max_pool3d.out adaptive_max_pool3d_backward.grad_input add.out
    addbmm.out addcdiv.out addcmul.out addmm.out addmv.out addr.out all.all_out all.dims_out all.out amax.out
    amin.out aminmax.out angle.out any.all_out any.dims_out any.out argmax.out argmin.out asin.out asinh.out
    atan.out atan2.out atanh.out avg_pool2d.out avg_pool2d_backward.grad_input avg_pool3d.out
    avg_pool3d_backward.grad_input baddbmm.out bernoulli.out binary_cross_entropy_backward.grad_input
    bitwise_and.Tensor_out bitwise_left_shift.Tensor_out bitwise_not.out bitwise_or.Tensor_out
    bitwise_right_shift.Tensor_out bitwise_xor.Tensor_out bmm.out bucketize.Tensor_out cat.out ceil.out cholesky.out
    clamp.Tensor_out clamp.out clamp_max.Tensor_out clamp_min.Tensor_out clamp_min.out col2im.out complex.out
    copysign.out cos.out cosh.out cumprod.out cumsum.out digamma.out div.out div.out_mode elu.out
    elu_backward.grad_input eq.Scalar_out eq.Tensor_out erf.out erfc.out erfinv.out exp.out exp2.out expm1.out
    floor.out floor_divide.out fmax.out fmin.out fmod.Tensor_out frac.out fractional_max_pool2d.output
    fractional_max_pool2d_backward.grad_input fractional_max_pool3d.output fractional_max_pool3d_backward.grad_input
    frexp.Tensor_out gather.out gcd.out ge.Scalar_out ge.Tensor_out gelu.out gelu_backward.grad_input glu.out
    glu_backward.grad_input gt.Scalar_out gt.Tensor_out hardshrink.out hardshrink_backward.grad_input
    hardsigmoid.out hardsigmoid_backward.grad_input hardswish.out hardtanh.out hardtanh_backward.grad_input
    hash_tensor.out heaviside.out histc.out histogram.bin_ct_out histogram.bins_tensor_out huber_loss_backward.out
    hypot.out i0.out igamma.out igammac.out im2col.out index.Tensor_out index_add.out index_copy.out
    index_reduce.out index_select.out isin.Tensor_Tensor_out isneginf.out isposinf.out kthvalue.values lcm.out
    le.Scalar_out le.Tensor_out leaky_relu.out leaky_relu_backward.grad_input lerp.Scalar_out lerp.Tensor_out
    lgamma.out linalg_cholesky_ex.L linalg_cross.out linalg_householder_product.out linalg_inv_ex.inverse
    linalg_ldl_factor_ex.out linalg_ldl_solve.out linalg_lu.out linalg_lu_factor_ex.out linalg_lu_solve.out
    linalg_qr.out linalg_solve_triangular.out linalg_vector_norm.out log.out log10.out log1p.out log2.out
    log_sigmoid_backward.grad_input log_sigmoid_forward.output logaddexp.out logaddexp2.out logical_and.out
    logical_not.out logical_or.out logical_xor.out logit.out logit_backward.grad_input lt.Scalar_out lt.Tensor_out
    lu_unpack.out masked_select.out max.dim_max max.unary_out max_pool2d_with_indices.out
    max_pool2d_with_indices_backward.grad_input max_pool3d_with_indices.out
    max_pool3d_with_indices_backward.grad_input max_unpool2d.out max_unpool3d.out maximum.out mean.out
    median.dim_values min.dim_min min.unary_out minimum.out mish.out mm.out mse_loss_backward.grad_input mul.out
    multi_margin_loss.out multi_margin_loss_backward.grad_input multilabel_margin_loss_backward.grad_input
    multilabel_margin_loss_forward.output multinomial.out mvlgamma.out nan_to_num.out nanmedian.dim_values
    nansum.out narrow_copy.out native_batch_norm.out ne.Scalar_out ne.Tensor_out neg.out nextafter.out
    nll_loss2d_backward.grad_input nll_loss2d_forward.output nll_loss_backward.grad_input nll_loss_forward.output
    nonzero.out nonzero_static.out norm.out normal.Tensor_Tensor_out normal.Tensor_float_out polar.out polygamma.out
    pow.Scalar_out pow.Tensor_Scalar_out pow.Tensor_Tensor_out prod.int_out reciprocal.out reflection_pad1d.out
    reflection_pad1d_backward.grad_input reflection_pad2d.out reflection_pad2d_backward.grad_input
    reflection_pad3d.out reflection_pad3d_backward.grad_input remainder.Tensor_out renorm.out replication_pad1d.out
    replication_pad1d_backward.grad_input replication_pad2d.out replication_pad2d_backward.grad_input
    replication_pad3d.out replication_pad3d_backward.grad_input round.decimals_out round.out rsqrt.out
    scatter.reduce_out scatter.src_out scatter.value_out scatter_add.out scatter_reduce.two_out
    searchsorted.Tensor_out sgn.out sigmoid.out sigmoid_backward.grad_input sign.out signbit.out silu.out
    silu_backward.grad_input sin.out sinc.out sinh.out smooth_l1_loss_backward.grad_input softplus.out
    softplus_backward.grad_input softshrink.out softshrink_backward.grad_input sort.values_stable
    special_airy_ai.out special_bessel_j0.out special_bessel_j1.out special_bessel_y0.out special_bessel_y1.out
    special_chebyshev_polynomial_t.out special_chebyshev_polynomial_u.out special_chebyshev_polynomial_v.out
    special_chebyshev_polynomial_w.out special_entr.out special_erfcx.out special_hermite_polynomial_h.out
    special_hermite_polynomial_he.out special_i0e.out special_i1.out special_i1e.out
    special_laguerre_polynomial_l.out special_legendre_polynomial_p.out special_log_ndtr.out
    special_modified_bessel_i0.out special_modified_bessel_i1.out special_modified_bessel_k0.out
    special_modified_bessel_k1.out special_ndtri.out special_scaled_modified_bessel_k0.out
    special_scaled_modified_bessel_k1.out special_shifted_chebyshev_polynomial_t.out
    special_shifted_chebyshev_polynomial_u.out special_shifted_chebyshev_polynomial_v.out
    special_shifted_chebyshev_polynomial_w.out special_spherical_bessel_j0.out special_xlog1py.out special_zeta.out
    sqrt.out std.correction_out sub.out sum.IntList_out take.out tan.out tanh.out tanh_backward.grad_input
    threshold.out threshold_backward.grad_input topk.values tril.out triu.out trunc.out upsample_bicubic2d.out
    upsample_bicubic2d_backward.grad_input upsample_bilinear2d.out upsample_bilinear2d_backward.grad_input
    upsample_linear1d.out upsample_linear1d_backward.grad_input upsample_nearest1d.out
    upsample_nearest1d_backward.grad_input upsample_nearest2d.out upsample_nearest2d_backward.grad_input
    upsample_nearest3d.out upsample_nearest3d_backward.grad_input upsample_trilinear3d.out
    upsample_trilinear3d_backward.grad_input var.correction_out where.self_out xlogy.OutTensor
    """.split()
)
