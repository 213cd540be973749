"""Small made-up tables of other projects' timings, and the rows that they become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from catalog.runtime.catalog import Catalog

HEADER = "cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
GEMM = f"""{HEADER}
304,16,1536,7168,8,0,19.50,made_up_256x16x64,18.06,573.1,0.0
304,32,1536,7168,8,1,20.25,made_up_256x32x64,34.79,560.0,0.01
80,16,1536,7168,3,0,31.0,made_up_128x16x64,11.36,360.5,0.0
"""
FMOE = """cu_num,token,model_dim,inter_dim,expert,topk,act_type,dtype,q_dtype_a,q_dtype_w,q_type,use_g1u1,\
doweight_stage1,block_m,ksplit,us1,kernelName1,err1,us2,kernelName2,err2,us,run_1stage,tflops,bw
256,64,4096,1024,8,2,Silu,bf16,fp8,fp8,per_Token,1,0,32,0,100.5,made_up_stage1,0.0%,50.25,made_up_stage2,1.5%,150.75,0,1.5,2.5
256,128,4096,1024,8,2,Silu,bf16,fp8,fp8,per_Token,1,0,64,0,1.0,made_up_one_stage,0.0%,0,,,0,1,0,0
"""
TUNABLEOP = """Validator,PT_VERSION,2.6.0
Validator,GCN_ARCH_NAME,gfx942:sramecc+:xnack-
GemmTunableOp_Half_TN,tn_64_128_256_ld_256_256_64,Gemm_Hipblaslt_77,0.0125
GemmStridedBatchedTunableOp_BFloat16_NN,nn_64_32_16_B_8_ld_64_16_64,Default,0.5,"BLAS_PARAMS: - { M: 64, N: 32 }"
"""
FDB = """64-56-56-3x3-128-28-28-8-1x1-2x2-1x1-0-NCHW-FP16-F_g2=SolverA:0.25,4096,algorithmA;SolverB:0.5,0,algorithmB
3-224-224-7x7-64-112-112-1-3x3-2x2-1x1-0-NCHW-FP32-W=algorithmC:SolverC,1.5,0,algorithmC,<unused>
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def rows(catalog: Catalog, columns: str, where: str = "TRUE") -> list[tuple[Any, ...]]:
    found = catalog.connection.execute(f"SELECT {columns} FROM foreign_timings WHERE {where} ORDER BY file, line, name")
    return [tuple(row) for row in found]
