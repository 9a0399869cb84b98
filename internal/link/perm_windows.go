// SPDX-License-Identifier: Apache-2.0

package link

import (
	"fmt"
	"io/fs"
	"os"
	"unsafe"

	"golang.org/x/sys/windows"
)

func openToken(path string) (*os.File, error) { return os.Open(path) }

// readRights are those by which a file's content is read, or its access list
// changed so that it can be.
const readRights = windows.FILE_READ_DATA | windows.GENERIC_READ | windows.GENERIC_ALL | windows.WRITE_DAC | windows.WRITE_OWNER

// privateFile checks the access list: mode bits mean nothing here. Besides us
// only the system and administrators may read, who can read everything.
func privateFile(path string, _ fs.FileInfo) error {
	sd, err := windows.GetNamedSecurityInfo(path, windows.SE_FILE_OBJECT, windows.DACL_SECURITY_INFORMATION)
	if err != nil {
		return fmt.Errorf("%s: read its access list: %w", path, err)
	}
	dacl, _, err := sd.DACL()
	if err != nil {
		return fmt.Errorf("%s: read its access list: %w", path, err)
	}
	if dacl == nil {
		return fmt.Errorf("%s has no access list, all may read it: remove it and pair again", path)
	}
	us, err := currentUser()
	if err != nil {
		return err
	}
	for i := range uint32(dacl.AceCount) {
		var ace *windows.ACCESS_ALLOWED_ACE
		if err := windows.GetAce(dacl, i, &ace); err != nil {
			return fmt.Errorf("%s: read its access list: %w", path, err)
		}
		if ace.Header.AceType != windows.ACCESS_ALLOWED_ACE_TYPE || ace.Mask&readRights == 0 || ace.Header.AceFlags&windows.INHERIT_ONLY_ACE != 0 {
			continue
		}
		sid := (*windows.SID)(unsafe.Pointer(&ace.SidStart))
		if !sid.Equals(us) && !sid.IsWellKnown(windows.WinLocalSystemSid) && !sid.IsWellKnown(windows.WinBuiltinAdministratorsSid) {
			return fmt.Errorf("%s may be read by %s: remove it and pair again, or give its access to yourself alone", path, sid)
		}
	}
	return nil
}

// restrict gives a file to the current user alone, whatever its directory hands
// down.
func restrict(path string) error {
	us, err := currentUser()
	if err != nil {
		return err
	}
	sd, err := windows.SecurityDescriptorFromString(fmt.Sprintf("D:P(A;;FA;;;%s)", us))
	if err != nil {
		return fmt.Errorf("access list for %s: %w", path, err)
	}
	dacl, _, err := sd.DACL()
	if err != nil {
		return fmt.Errorf("access list for %s: %w", path, err)
	}
	err = windows.SetNamedSecurityInfo(path, windows.SE_FILE_OBJECT,
		windows.DACL_SECURITY_INFORMATION|windows.PROTECTED_DACL_SECURITY_INFORMATION, nil, nil, dacl, nil)
	if err != nil {
		return fmt.Errorf("set the access list of %s: %w", path, err)
	}
	return nil
}

func currentUser() (*windows.SID, error) {
	u, err := windows.GetCurrentProcessToken().GetTokenUser()
	if err != nil {
		return nil, fmt.Errorf("find out the current user: %w", err)
	}
	return u.User.Sid, nil
}

// openDir leaves it to the access list, as privateDir.
func openDir(string, bool) error { return nil }

// privateDir leaves it to the directory's access list, which the user's profile
// provides.
func privateDir(string, fs.FileInfo) error { return nil }

// trustedDir leaves it to the access list, as privateDir.
func trustedDir(string) error { return nil }
