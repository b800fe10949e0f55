"""The node tests of the `onnx` package that fail here, by reason."""

from __future__ import annotations

# names without `test_`, separated by spaces
_BY_REASON = {
    "neither a function nor, for this version, a kernel of ONNX Runtime": """
        adagrad adagrad_multiple adam adam_multiple image_decoder_decode_jpeg_rgb
        image_decoder_decode_jpeg_grayscale image_decoder_decode_jpeg_bgr
        image_decoder_decode_jpeg2k_rgb image_decoder_decode_bmp_rgb image_decoder_decode_png_rgb
        image_decoder_decode_tiff_rgb image_decoder_decode_webp_rgb image_decoder_decode_pnm_rgb
        momentum nesterov_momentum momentum_multiple roialign_aligned_false roialign_aligned_true
        roialign_mode_max
    """,
    "torch has no kernel for uint16, uint32 or uint64": """
        add_uint16 add_uint32 add_uint64 bitwise_not_3d div_uint16 div_uint32 div_uint64
        greater_uint16 greater_uint32 greater_uint64 greater_equal_uint16
        greater_equal_uint16_expanded greater_equal_uint32 greater_equal_uint32_expanded
        greater_equal_uint64 greater_equal_uint64_expanded less_uint16 less_uint32 less_uint64
        less_equal_uint16 less_equal_uint16_expanded less_equal_uint32 less_equal_uint32_expanded
        less_equal_uint64 less_equal_uint64_expanded max_uint16 max_uint32 max_uint64 min_uint16
        min_uint32 min_uint64 mod_uint16 mod_uint32 mod_uint64 sub_uint16 sub_uint32 sub_uint64
        top_k_uint64
    """,
    "torch has no tensors of text": """
        ai_onnx_ml_label_encoder_string_int ai_onnx_ml_label_encoder_string_int_no_default
        ai_onnx_ml_label_encoder_tensor_mapping ai_onnx_ml_label_encoder_tensor_value_only_mapping
        equal_string equal_string_broadcast regex_full_match_basic regex_full_match_email_domain
        regex_full_match_empty string_concat string_concat_broadcasting
        string_concat_zero_dimensional string_concat_empty_string string_concat_utf8
        string_split_basic string_split_maxsplit string_split_consecutive_delimiters
        string_split_empty_string_delimiter string_split_no_delimiter string_split_empty_tensor
        strnormalizer_nostopwords_nochangecase
        strnormalizer_export_monday_casesensintive_nochangecase
        strnormalizer_export_monday_casesensintive_lower
        strnormalizer_export_monday_casesensintive_upper strnormalizer_export_monday_empty_output
        strnormalizer_export_monday_insensintive_upper_twodim
    """,
    "rounded once where the expected values are rounded twice": """
        attention_4d_fp16 attention_4d_causal_fp16 attention_4d_causal_fp16_expanded
    """,
    "random values": """
        bernoulli bernoulli_expanded bernoulli_double bernoulli_double_expanded bernoulli_seed
        bernoulli_seed_expanded training_dropout_default training_dropout_default_mask
        training_dropout training_dropout_mask
    """,
    "torch has no type with so few bits": """
        cast_FLOAT_to_UINT4 cast_FLOAT16_to_UINT4 cast_FLOAT_to_INT4 cast_FLOAT16_to_INT4
        cast_FLOAT4E2M1_to_FLOAT cast_FLOAT4E2M1_to_FLOAT16 cast_FLOAT_to_FLOAT4E2M1
        cast_FLOAT16_to_FLOAT4E2M1 cast_FLOAT_to_UINT2 cast_FLOAT16_to_UINT2 cast_FLOAT_to_INT2
        cast_FLOAT16_to_INT2 cast_e8m0_FLOAT_to_FLOAT8E8M0 cast_e8m0_FLOAT16_to_FLOAT8E8M0
        cast_e8m0_FLOAT8E8M0_to_FLOAT cast_e8m0_FLOAT8E8M0_to_FLOAT16 castlike_FLOAT_to_UINT4
        castlike_FLOAT_to_UINT4_expanded castlike_FLOAT16_to_UINT4
        castlike_FLOAT16_to_UINT4_expanded castlike_FLOAT_to_INT4 castlike_FLOAT_to_INT4_expanded
        castlike_FLOAT16_to_INT4 castlike_FLOAT16_to_INT4_expanded castlike_FLOAT4E2M1_to_FLOAT
        castlike_FLOAT4E2M1_to_FLOAT_expanded castlike_FLOAT4E2M1_to_FLOAT16
        castlike_FLOAT4E2M1_to_FLOAT16_expanded castlike_FLOAT_to_FLOAT4E2M1
        castlike_FLOAT_to_FLOAT4E2M1_expanded castlike_FLOAT16_to_FLOAT4E2M1
        castlike_FLOAT16_to_FLOAT4E2M1_expanded castlike_FLOAT_to_UINT2
        castlike_FLOAT_to_UINT2_expanded castlike_FLOAT16_to_UINT2
        castlike_FLOAT16_to_UINT2_expanded castlike_FLOAT_to_INT2 castlike_FLOAT_to_INT2_expanded
        castlike_FLOAT16_to_INT2 castlike_FLOAT16_to_INT2_expanded dequantizelinear_float4e2m1
        quantizelinear_uint4 quantizelinear_int4 quantizelinear_uint2 quantizelinear_int2
        quantizelinear_float4e2m1
    """,
    "torch rounds values just above the range of float8_e4m3fn to its largest number": """
        cast_no_saturate_FLOAT_to_FLOAT8E4M3FN cast_no_saturate_FLOAT16_to_FLOAT8E4M3FN
        castlike_no_saturate_FLOAT_to_FLOAT8E4M3FN
        castlike_no_saturate_FLOAT_to_FLOAT8E4M3FN_expanded
        castlike_no_saturate_FLOAT16_to_FLOAT8E4M3FN
        castlike_no_saturate_FLOAT16_to_FLOAT8E4M3FN_expanded
    """,
    "torch may choose another of several equal elements": """
        top_k_same_values top_k_same_values_largest top_k_same_values_2d
    """,
    "the expected values are rounding errors around 0": """
        dft_inverse_opset19 dft_inverse
    """,
    "ONNX Runtime refuses the node": """
        convinteger_with_padding
    """,
}
KNOWN_FAILURES = {f"test_{name}": reason for reason, names in _BY_REASON.items() for name in names.split()}
