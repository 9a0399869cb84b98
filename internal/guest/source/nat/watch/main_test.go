// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }
