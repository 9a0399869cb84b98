// SPDX-License-Identifier: Apache-2.0

package hostinstall

import (
	"fmt"

	"golang.org/x/sys/windows"
)

// CurrentUser returns the SID of this process's user.
func CurrentUser() (string, error) {
	u, err := windows.GetCurrentProcessToken().GetTokenUser()
	if err != nil {
		return "", fmt.Errorf("find out who we are: %w", err)
	}
	return u.User.Sid.String(), nil
}
