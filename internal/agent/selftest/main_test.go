// SPDX-License-Identifier: Apache-2.0

//go:build linux

package selftest

import (
	"testing"

	"github.com/fairlead/fairlead/test/kit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }
