# Install videotune from this folder into .venv, with the build of PyTorch for this machine (Windows).
#
#   .\install.ps1             asks before it installs anything outside this folder
#   .\install.ps1 -DryRun     prints the commands and runs none
#
# -Yes installs uv without asking, -Pip uses py or python with pip, not uv, -Extras NAMES (such as all), -Build NAME (cpu, or a
# line of scripts/torch_builds.txt, whatever the driver), -TorchFromPip takes PyTorch from the index that pip or uv is set up
# with, not from download.pytorch.org. If scripts may not run: powershell -ExecutionPolicy Bypass -File install.ps1
# Options are named: without this, --dry-run would be taken for the names of extras.
[CmdletBinding(PositionalBinding = $false)]
param([switch]$DryRun, [switch]$Yes, [switch]$Pip, [switch]$TorchFromPip, [string[]]$Extras = @(), [string]$Build = "")
$ErrorActionPreference = "Stop"
Set-Location -LiteralPath $PSScriptRoot

$Index = "https://download.pytorch.org/whl"
$UvInstaller = "https://astral.sh/uv/install.ps1"
$Python = ".venv\Scripts\python.exe"

function Invoke-Step {
    param([string[]]$Command)
    Write-Output "+ $($Command -join ' ')"
    if ($DryRun) { return }
    $program = $Command[0]
    $arguments = @($Command | Select-Object -Skip 1)
    if (-not (Get-Command $program -ErrorAction SilentlyContinue)) { throw "install.ps1: $program was not found" }
    # Where the host redirects standard error, its first line would end the script: Windows PowerShell makes it an error.
    $ErrorActionPreference = "Continue"
    & $program @arguments
    if ($LASTEXITCODE) { throw "install.ps1: $program ended with exit code $LASTEXITCODE" }
}

# The lines of the table: build, driver on Linux, driver on Windows, compute capability.
function Get-Builds {
    foreach ($line in Get-Content scripts/torch_builds.txt) {
        if ($line -match '^\s*(#|$)') { continue }
        $name, $null, $driver, $capability = -split $line
        [pscustomobject]@{ Name = $name; Driver = [version]$driver; Capability = [version]$capability }
    }
}

# Driver and compute capability of the oldest card, or nothing without a driver that answers.
function Find-Card {
    if (-not (Get-Command nvidia-smi -ErrorAction SilentlyContinue)) { return }
    $ErrorActionPreference = "Continue"
    $rows = & nvidia-smi "--query-gpu=driver_version,compute_cap" "--format=csv,noheader" 2>$null
    $row = '^\s*([0-9]+(?:\.[0-9]+){1,3}),\s*([0-9]+\.[0-9]+)\s*$'
    $rows | Where-Object { $_ -match $row } | ForEach-Object {
        $null = $_ -match $row
        [pscustomobject]@{ Driver = [version]$Matches[1]; Capability = [version]$Matches[2] }
    } | Sort-Object Capability | Select-Object -First 1
}

# The program that starts Python 3.11 or newer.
function Find-Python {
    $program = @("py", "python") | Where-Object { Get-Command $_ -ErrorAction SilentlyContinue } | Select-Object -First 1
    if (-not $program) { throw "install.ps1: Python is not installed; videotune needs Python 3.11 or newer" }
    $ErrorActionPreference = "Continue"
    $null = & $program -c "import sys; sys.exit(sys.version_info < (3, 11))"
    if ($LASTEXITCODE) { throw "install.ps1: $program does not start Python 3.11 or newer (uv can install one)" }
    return $program
}

if ($TorchFromPip) {
    if ($Build) { throw "install.ps1: -Build and -TorchFromPip both choose the build of PyTorch. Leave one out" }
    Write-Output "PyTorch: the build of your own package index, as asked for."
} elseif ($Build) {
    if ($Build -ne "cpu" -and $Build -notin (Get-Builds).Name) { throw "install.ps1: -Build: $Build is not in scripts/torch_builds.txt" }
    Write-Output "PyTorch: the build $Build, as asked for."
} else {
    $card = Find-Card
    $Build = "cpu"
    if ($card) {
        $fitting = Get-Builds | Where-Object { $card.Driver -ge $_.Driver -and $card.Capability -ge $_.Capability } | Select-Object -First 1
        if ($fitting) { $Build = $fitting.Name }
    }
    if (-not $card -and (Get-Command nvidia-smi -ErrorAction SilentlyContinue)) {
        Write-Output "PyTorch: the build for the CPU, because nvidia-smi names no card. Is the driver loaded?"
    } elseif (-not $card) {
        Write-Output "PyTorch: the build for the CPU, because there is no driver of NVIDIA (no nvidia-smi)."
    } elseif ($Build -eq "cpu") {
        Write-Output "PyTorch: the build for the CPU, because driver $($card.Driver) is older than any build needs, or the card is."
        Write-Output "Install a driver from https://www.nvidia.com/drivers (528.33 or newer), and start this again."
    } else {
        Write-Output "PyTorch: the build $Build, for driver $($card.Driver) and compute capability $($card.Capability)."
    }
}

if (-not $Pip -and -not (Get-Command uv -ErrorAction SilentlyContinue)) {
    Write-Output "uv (https://docs.astral.sh/uv) installs Python packages fast, and Python itself. It is not here."
    $answer = "n"
    $canAsk = [Environment]::UserInteractive -and -not [Console]::IsInputRedirected
    if ($Yes) { $answer = "y" } elseif ($canAsk -and -not $DryRun) { $answer = Read-Host "Run its installer, $UvInstaller? It writes to your user folder. [y/N]" }
    if ($answer -match '^(y|yes)$') {
        Invoke-Step @("powershell", "-ExecutionPolicy", "Bypass", "-c", "irm $UvInstaller | iex")
        $env:Path = "$env:USERPROFILE\.local\bin;$env:Path"
    } else {
        Write-Output "Without uv: Python and pip."
        $Pip = $true
    }
}

$match = Select-String -Path pyproject.toml -Pattern '^\s*"(torch>[^"]*)"' | Select-Object -First 1
if (-not $match) { throw "install.ps1: pyproject.toml does not name torch" }
$torch = $match.Matches[0].Groups[1].Value
if ($Pip) {
    $system = Find-Python
    if (-not (Test-Path $Python)) { Invoke-Step @($system, "-m", "venv", ".venv") }
    $install = @($Python, "-m", "pip", "--disable-pip-version-check", "install")
} else {
    if (-not (Test-Path $Python)) { Invoke-Step @("uv", "venv", "--python", ">=3.11", ".venv") }
    $install = @("uv", "pip", "install", "--python", $Python)
}

# Whether the index of PyTorch answers; the last words of pip name a version that was not found, also where it does not.
function Test-Index {
    $answers = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=20)"
    $ErrorActionPreference = "Continue"
    & $Python -c $answers "$Index/$Build/torch/" 2>$null
    return -not $LASTEXITCODE
}

# torch first and alone, so that nothing else chooses its build
if ($TorchFromPip) {
    Invoke-Step ($install + @($torch))
} else {
    try {
        Invoke-Step ($install + @("--index-url", "$Index/$Build", $torch))
    } catch {
        if (Test-Index) { throw }
        throw "install.ps1: PyTorch's index (download.pytorch.org) was not reached. With your own pip index: .\install.ps1 -TorchFromPip"
    }
}
$package = "."
if ($Extras) { $package = ".[$($Extras -join ',')]" }
Invoke-Step ($install + @($package))
Invoke-Step @(".venv\Scripts\videotune.exe", "doctor")

Write-Output ""
if ($DryRun) {
    Write-Output "Nothing was installed. Without -DryRun these commands install into .venv."
    exit 0
}
Write-Output "Installed into .venv. Next:"
Write-Output "  .venv\Scripts\activate    # if scripts may not run: Set-ExecutionPolicy -Scope Process Bypass"
Write-Output "  videotune studio    # in the browser; or in the terminal: videotune demo"
